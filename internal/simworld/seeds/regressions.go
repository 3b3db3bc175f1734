package seeds

// Regression is a run that once found a fault of the product, or of its model.
type Regression struct {
	Scenario, Name string
	Fault          string // the name of the planted fault that the run finds; "": it is not among them
	Seed           uint64
	Choices        string // as world.Format writes them
}

// Regressions returns the runs that must not fail, and with their planted faults must.
func Regressions() []Regression {
	return []Regression{
		{"loader", "an archive changes between two rounds of a stream",
			"a stream's second pass may be over another archive", 1,
			"samples#0=11;size#0=593;size#23=489;format#0=5;repeat#0=3;order#0=3;buffer#0=4;" +
				"buffer bytes#0=1;archive changes#13=2"},
		{"loader", "a rank resumes after a batch that bad samples have cut short",
			"a batch that bad samples cut short is a whole one", 30001075,
			"samples#0=2;classes#0=2;damage#0=1;payload#0=235;size#0=317;bad#0=5;spoil#0=2;payload#1=119;" +
				"size#1=169;bad#1=3;format#0=3;remote#0=3;deflate#1=1;give classes#0=1;batch#0=4;world#0=2;" +
				"seed#0=105;policy#0=1;last#0=2;epochs#0=1;no index#0=2;order#0=1;rare names#0=2;" +
				"rare syncs#0=3;rare responses#0=2;rare leaves#0=3;network disk#0=2;deal again#0=1;" +
				"rank 0 killed#0=1;rank 0 call#0=18;rank 0 loses power#0=1;rank 2 workers#0=1;leave#2=3;" +
				"rank 0 killed#1=2;rank 0 call#1=3;rank 0 loses power#1=2;rank 0 workers#1=1;" +
				"rank 0 killed#2=2;rank 0 call#2=14;rank 0 loses power#2=3;leave#3=2;rank 0 workers#3=2;" +
				"rank 2 killed#1=1;rank 2 call#0=28;rank 2 loses power#0=2;rank 2 workers#1=1"},
		{"loader", "a server compresses a range to as many bytes, and bad samples are skipped",
			"a compressed answer of the same length is read", 1,
			"samples#0=3;size#0=600;size#1=600;size#2=600;format#0=3;remote#0=3;policy#0=1;" +
				"rare responses#0=1;fault get train.zip#9=12"},
		{"loader", "another file replaces a stream that has had enough good samples",
			"a read error counts only if samples are missing", 1,
			"samples#0=11;format#0=1;no index#0=3;give classes#0=1;policy#0=1;last#0=2;epochs#0=1;" +
				"held bytes#0=1;archive changes#0=5"},
		{"loader", "reading fails while the shuffle buffer has enough samples",
			"a read error is lost if the buffer has enough samples", 130001391,
			"samples#0=11;damage#0=2;payload#0=190;size#0=500;bad#0=5;payload#1=189;size#1=325;bad#1=3;" +
				"payload#2=111;size#2=190;bad#2=2;payload#3=166;size#3=430;bad#3=3;payload#4=162;size#4=167;" +
				"bad#4=5;payload#5=169;size#5=206;bad#5=5;payload#6=121;size#6=347;bad#6=4;payload#7=176;" +
				"size#7=445;payload#8=202;size#8=437;bad#8=3;payload#9=255;size#9=136;bad#9=2;payload#10=128;" +
				"size#10=75;payload#11=169;size#11=385;bad#11=5;payload#12=105;size#12=612;bad#12=1;" +
				"payload#13=132;size#13=359;bad#13=2;payload#14=68;size#14=131;bad#14=1;payload#15=197;" +
				"size#15=450;bad#15=3;payload#16=12;size#16=110;bad#16=1;payload#17=48;size#17=182;bad#17=5;" +
				"payload#18=253;size#18=659;payload#19=160;size#19=597;bad#19=5;payload#20=100;size#20=37;" +
				"bad#20=4;payload#21=232;size#21=176;bad#21=4;payload#22=250;size#22=486;bad#22=3;" +
				"payload#23=66;size#23=140;bad#23=1;payload#24=141;size#24=426;bad#24=5;format#0=5;" +
				"remote#0=3;flush#0=1;batch#0=1;repeat#0=1;seed#0=518;policy#0=1;last#0=2;no index#0=2;" +
				"order#0=3;buffer#0=1;buffer bytes#0=1;rare reads#0=3;rare syncs#0=3;rare locks#0=2;" +
				"rare responses#0=1;rare stops#0=3;index#0=5;deal again#0=1;index process#0=2;" +
				"rank 0 killed#0=2;rank 0 call#0=85;rank 0 workers#0=2;fault readat train.remote.tsidx#8=1;" +
				"fault readat train.remote.tsidx#15=1;fault get train-1.tgz#5=10;archive changes#7=2"},
		{"loader", "another stream replaces one whose epoch a bad sample has ended",
			"an epoch reads an archive that has changed", 1795918556766,
			"samples#0=11;damage#0=1;bad#4=5;format#0=5;give classes#0=1;epochs#0=2;archive changes#1=9"},
		{"loader", "another process removes the index while one looks at it",
			"", 5002118,
			"samples#0=8;damage#0=1;bad#6=5;remote#0=3;batch#0=2;world#0=1;policy#0=1;rare responses#0=3;" +
				"index#0=6;deal again#0=1;index process#0=5;index process waits#0=1;fault get train.tar#2=6;" +
				"fault get train.tar#6=10;fault get train.tar#19=4;other world#0=1;rank 0 killed#2=1;" +
				"rank 0 call#0=5;rank 0 loses power#0=3;index before a process#5=4"},
		{"loader", "a server does not answer the calls that remove the lock of an index",
			"", 1795947169972947,
			"remote#0=3;rare names#0=2;fault rename train.remote.tsidx#0=5;calls without an answer#0=3"},
		{"loader", "a sample that is read out of the archive's order ends an epoch",
			"", 1795947169906843,
			"size#1=510;size#4=615;size#5=404;format#0=5;remote#0=3;give classes#0=1;epochs#0=1;order#0=3;" +
				"buffer#0=5;buffer bytes#0=1;rare responses#0=2;fault get train-1.tgz#12=12"},
		{"save", "a loss of power brings back files that an index has replaced",
			"an index forgets what it replaced", 6,
			"kind#0=3;saves#0=2;tensors#0=2;lives#0=4;rank 0 killed#0=1;rank 0 killed#1=1;" +
				"rank 0 loses power#1=2;crash name last-000000000004-00001-of-00002.safetensors#0=1"},
		{"save", "a loss of power brings back ranks' files that a checkpoint has replaced",
			"a ranks' checkpoint forgets what it replaced", 363,
			"saves#0=1;tensors#0=3;ranks#0=1;rank 1 killed#0=1;rank 1 loses power#0=2;" +
				"crash name last.pt-000000000001-rank00000-of-00002.safetensors#0=1"},
		{"save", "two hosts save, and one takes the other's new index for a leftover",
			"a stale lookup decides that a file is abandoned", 2973,
			"kind#0=3;saves#0=1;starts without a checkpoint#0=1;network disk#0=3;ranks#0=3;" +
				"rank 1 killed#0=1;rank 1 call#0=32;rank 1 loses power#0=2"},
		{"save", "a file that cannot be removed is forgotten",
			"an abandoned file goes although its parts cannot be removed", 2465,
			"kind#0=3;saves#0=2;tensors#0=1;size#0=6;rare moves#0=3;rare syncs#0=2;lives#0=1;" +
				"fault remove last-000000000007-00001-of-00002.safetensors#0=1;fault sync ckpt#10=1;" +
				"fault rename last.safetensors.index.json#3=1;" +
				"fault remove last-000000000015-00001-of-00002.safetensors#0=1"},
		{"save", "a loss of power leaves an index under both names",
			"a rename that leaves both names costs the parts", 214,
			"kind#0=3;saves#0=2;rare names#0=2;rare syncs#0=3;lives#0=3;ranks#0=3;rank 1 killed#0=1;" +
				"rank 1 call#0=22;fault sync ckpt#6=1;rank 0 killed#1=1;rank 0 call#0=36;rank 0 killed#2=1;" +
				"rank 0 call#1=108;rank 0 is killed after a rename#1=2;rank 0 rename#0=3;" +
				"power fails after a life#2=2;crash name last.safetensors.index.json.tmp-00000000000f#0=1;" +
				"fault open last-000000000011-00001-of-00001.safetensors.tmp-000000000012#0=3"},
		{"save", "a folder that cannot be synced is no error",
			"an error of syncing the folder is ignored", 83,
			"saves#0=1;rare names#0=2;ranks#0=1;fault open ckpt#7=2;power fails after a life#0=2;" +
				"crash name last.pt#0=1"},
		{"save", "a killed rank leaves a temporary file of a part",
			"temporary files of parts are none", 56,
			"starts without a checkpoint#0=1;lives#0=2;ranks#0=1;ranks part#0=5;rank 1 killed#0=1;" +
				"ranks#1=3;rank 1 killed#1=1;ranks#2=1;rank 1 killed#2=1;rank 1 call#2=10"},
		{"save", "a loss of power brings back a part of a failed save",
			"an abandoned file goes before the removal of its parts is durable", 3520,
			"kind#0=3;starts without a checkpoint#0=1;rare writes#0=3;lives#0=1;rank 0 killed#0=1;" +
				"rank 0 call#0=7;" +
				"fault write last-000000000004-00001-of-00001.safetensors.tmp-000000000005#1=1;" +
				"power fails after a life#1=2;" +
				"crash name last-000000000004-00001-of-00001.safetensors.tmp-000000000005#1=1"},
		{"save", "a loss of power keeps parts without their main file",
			"a main file is not durable before its parts", 476,
			"kind#0=3;starts without a checkpoint#0=1;rank 0 killed#0=1;rank 0 call#0=18;" +
				"rank 0 loses power#0=2;crash name last.safetensors.index.json.tmp-000000000003#0=1"},
		{"save", "a save cannot read the index that it replaces",
			"the file that a save replaces counts as none if it cannot be read", 122,
			"kind#0=3;saves#0=1;tensors#0=2;size#0=5;size#1=6;size#2=1;rare reads#0=3;rare writes#0=5;" +
				"rare names#0=4;rare moves#0=4;rare syncs#0=4;rare locks#0=3;network disk#0=1;ranks#0=2;" +
				"ranks part#0=4;fault lock last-000000000009-00002-of-00003.safetensors.tmp-00000000000b#0=1;" +
				"fault read last.safetensors.index.json#4=2;bytes before a bad sector#0=220;" +
				"fault readat last.safetensors.index.json#2=1"},
		{"save", "a sync fails, and a loss of power brings back a part whose main file is gone",
			"parts are removed without a sync", 15232,
			"saves#0=1;tensors#0=2;rare moves#0=3;rare syncs#0=3;lives#0=3;one file#0=2;" +
				"rank 0 killed#0=1;rank 0 call#0=134;rank 0 is killed after a rename#0=1;rank 0 rename#0=3;" +
				"fault sync ckpt#2=1;power fails after a life#0=1;" +
				"crash name last.pt-000000000004-rank00000-of-00002.safetensors#0=1;ranks#1=3;" +
				"rank 0 killed#1=1;rank 0 call#1=46;rank 0 loses power#1=2;" +
				"crash name last.pt.tmp-000000000009#0=1;ranks#2=1;ranks part#2=5;fault readdir ckpt#6=1;" +
				"power fails after a life#2=2;crash name last.pt.tmp-00000000000a-abandoned#0=1;one file#3=2;" +
				"rank 0 killed#3=1;rank 0 call#2=180;rank 0 is killed after a rename#2=2;" +
				"power fails after a life#3=2;" +
				"crash name last.pt-000000000004-rank00000-of-00002.safetensors#1=1"},
		{"control", "a rank that was stopped blames rank 0",
			"a member that continues counts its own pause", 10,
			"steps#0=4;work#2=3324;barrier#4=2;work#4=935;fault#0=4;fault of rank#0=1;fault at#0=17857;" +
				"about as long as the silence#0=2;starts#0=939;lingers before Part#0=3;lingers#0=12385"},
		{"control", "a hub that was stopped blames the others",
			"a hub that was stopped blames the others", 45,
			"steps#0=5;work#0=7704;work#1=7881;fault#0=4;fault at#0=10240;fault for#0=11999"},
		{"control", "a rank aborts the job and closes at once",
			"a member closes its connection before the hub has read its messages", 1646,
			"fault#0=12;closes after Abort#0=1"},
		{"control", "a rank that frees its collectives for long finds the hub silent",
			"a rank that has left waits for the hub's beats", 18,
			"ranks#0=3;lingers after Part#2=3;lingers after Part for#0=11999"},
		{"control", "the hub closes before a rank that is stopped has read the verdict",
			"the hub waits for no rank that reads late", 783,
			"work#0=5795;faults#0=2;fault#0=12;fault#1=4;fault of rank#1=1;fault at#1=3906;" +
				"about as long as the silence#1=2"},
		{"control", "a rank reads a reset in place of the verdict after an early leave",
			"the hub closes connections at once", 2741,
			"ranks#0=5;clock#0=3;clock#1=3;steps#0=3;work#0=2463;work#1=7991;work#2=6127;fault#0=11;" +
				"fault of rank#0=2;fault at step#0=2;starts#0=2657;starts#1=271;starts#2=861"},
	}
}
