//go:build linux && cgo

// Command torchstream examines the machine and image archives, and trains classifiers.
//
//	torchstream setup                       installs the shim and LibTorch
//	torchstream doctor                      what is installed, what is missing, what to do
//	torchstream inspect FILE                classes, counts, sizes, formats and bad members of an archive
//	torchstream inspect -fix OUT FILE       and writes an archive without the bad members
//	torchstream index FILE                  the index of an archive, otherwise made by the first epoch
//	torchstream pack -archive FILE -o DIR   shuffled shards of any archive, resized and divided if asked to
//	torchstream preview -archive FILE       a contact sheet of batches as a training loop gets them
//	torchstream train -archive FILE         a classifier of the archive's classes, for Go and PyTorch
//	torchstream evaluate -archive FILE      accuracy and confusions of a checkpoint of train
//	torchstream predict IMAGE|FOLDER...     the classes of images, by a checkpoint of train
//	torchstream embed -archive FILE         a vector for each image, by an exported or trained model
//	torchstream serve -model FILE           classes of uploaded images, over HTTP
//	torchstream weights MODEL -url URL      published weights, verified, as safetensors
//	torchstream bundle PROGRAM -o DIR       a program with all its libraries, for other machines
//	torchstream version                     the version of torchstream and of Go
//	torchstream help COMMAND                the options of a command
//	torchstream bench loader -archive FILE  how fast an archive becomes batches
//
// The program loads the shim and LibTorch only for commands that need them. The commands inspect,
// index, pack and preview need only the image library, and so does bench loader without -device.
// The benchmarks of torchstream itself are in the command torchstream-lab (lab/).
//
// Results are written to standard output, progress and errors to standard error. The exit status is
// 0 on success, 1 if something failed or the command found a problem, 2 if the command line was
// wrong, and 130 after an interruption.
//
// SIGINT, SIGTERM and SIGHUP end commands within seconds, except two that may take up to a minute:
// train finishes its step and writes its checkpoint, and serve answers the requests that it has. A
// second SIGINT or SIGTERM ends any command at once. Under nohup SIGHUP is ignored.
package main

import (
	"os"
	"time"

	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/interrupt"
)

func main() {
	grace := interrupt.Grace
	if len(os.Args) > 1 && (os.Args[1] == "train" || os.Args[1] == "serve") {
		grace = time.Minute
	}
	program().Main(grace)
}

func program() *cli.Program {
	return &cli.Program{
		Name:     "torchstream",
		About:    "torchstream looks at the machine and at archives of images, trains classifiers, and measures.",
		Commands: cli.Commands{Kind: "command", List: commands()},
	}
}

func commands() []cli.Command {
	return []cli.Command{
		{Name: "setup", Args: "[-from ARCHIVE]",
			About: "installs the shim and LibTorch, outside of a clone", Run: setupCommand},
		{Name: "doctor", Args: "[-dist] [-json]",
			About: "what is installed, what to do; -dist: links between GPUs", Run: doctor},
		{Name: "inspect", Args: "[-fix OUT] FILE",
			About: "classes, sizes, formats and bad members of an archive", Run: inspect},
		{Name: "index", Args: "[-json] FILE",
			About: "writes the index of an archive, as a first epoch does", Run: index},
		{Name: "pack", Args: "-archive FILE -o DIR",
			About: "writes shuffled shards, resized and divided if asked to", Run: packCommand},
		{Name: "preview", Args: "-archive FILE",
			About: "a contact sheet of batches as a training loop gets them", Run: preview},
		{Name: "train", Args: "-archive FILE", About: "trains a classifier of the archive's classes",
			Run: trainCommand},
		{Name: "evaluate", Args: "-archive FILE", About: "how often a checkpoint of train is right",
			Run: evaluateCommand},
		{Name: "predict", Args: "IMAGE|FOLDER...", About: "the classes of images, by a checkpoint of train",
			Run: predictCommand},
		{Name: "embed", Args: "-archive FILE", About: "a vector for each image, by an exported or trained model",
			Run: embedCommand},
		{Name: "serve", Args: "-model FILE", About: "classes of uploaded images, over HTTP", Run: serveCommand},
		{Name: "weights", Args: "MODEL -url URL", About: "published weights, verified, as safetensors",
			Run: weightsCommand},
		{Name: "bundle", Args: "PROGRAM -o DIR",
			About: "a program with all that it loads, for other machines", Run: bundleCommand},
		{Name: "version", About: "the version of torchstream and of Go", Run: versionCommand},
		{Name: "bench", Under: cli.Commands{Kind: "benchmark", List: benchmarks()}},
	}
}

func benchmarks() []cli.Command {
	return []cli.Command{{Name: "loader", Args: "-archive FILE",
		About: "how fast an archive becomes batches", Run: benchLoader}}
}
