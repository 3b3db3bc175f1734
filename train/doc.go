// Package train is a training loop for networks, with batches from a prefetcher. It handles epochs,
// evaluation, metrics, a table of results, checkpoints, and runs that continue after an
// interruption.
//
//	report, err := train.Run(ctx, train.Config{
//		Model: net, Optimizer: opt, Feed: feed, Eval: evalFeed, Epochs: 10,
//		Schedule: optim.CosineLR{Steps: 10 * loader.Batches()},
//		Dir:      "run1", Resume: true, Progress: os.Stdout,
//	})
//
// The package uses only the public interface of the packages below it, so a program can write a
// different loop: examples/01-train shows one in full.
//
// A [Stepper] performs a single step without the loop. On a GPU [WithPrecedence] gives steps
// priority over the preparation of later batches.
//
// # Files
//
// Config.Dir holds these files. Each is replaced atomically, so none is ever half written:
//
//	last.pt        a [Checkpoint] with the position: where Resume continues
//	best.pt        the model of the best epoch, by evaluation if there is one, and the metadata
//	log.csv        one row for each epoch
//	curves.png     loss and top-1 over the epochs
//	confusion.csv  counts of true and predicted classes, from the best epoch's evaluation
//	confusion.png  a picture of confusion.csv
//
// Where ranks shard the model or the optimizer, each rank adds a file to a checkpoint. Package
// checkpoint derives that file's name from the checkpoint's name (checkpoint/rankfiles.go).
//
// PyTorch reads both checkpoints: torch.load(path, weights_only=True)["state_dict"]. nn.Load reads
// them too.
//
// # Resuming
//
// Run saves last.pt after every epoch, every Config.SaveSteps steps, and when its context ends or a
// hook returns ErrStop. A resumed run computes the results of an uninterrupted run. On the CPU,
// with the same number of threads, the parameters are bit-identical. On a GPU they differ only as
// much as two runs of the same kernels. Random numbers, for Dropout, continue where they stopped,
// because last.pt holds the generator states of the CPU and the device.
//
// A program with its own loop writes such a file with [Checkpoint].
package train
