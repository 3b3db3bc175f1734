// Package train is a training loop for networks that a prefetcher feeds: epochs, evaluation,
// metrics, a table of results, checkpoints, and runs that continue after an interruption.
//
//	report, err := train.Run(ctx, train.Config{
//		Model: net, Optimizer: opt, Feed: feed, Loader: loader, Eval: evalFeed, Epochs: 10,
//		Schedule: optim.CosineLR{Steps: 10 * loader.Batches()},
//		Dir:      "run1", Resume: true, Progress: os.Stdout,
//	})
//
// The package uses only the public interface of the packages below it, so a program that needs
// another loop can have one of its own: examples/01-train writes it out.
//
// A [Stepper] is one step without the loop. On a GPU [WithPrecedence] lets steps go before the
// preparation of later batches.
//
// # Files
//
// Config.Dir holds these files, each replaced as a whole, so that none is ever half written:
//
//	last.pt        a [Checkpoint] with the position: where Resume continues
//	best.pt        the model of the best epoch, by evaluation if there is one, and the metadata
//	log.csv        one row for each epoch
//	curves.png     loss and top-1 over the epochs
//	confusion.csv  of a classifier's evaluation in the best epoch: true classes, and what they were taken for
//	confusion.png  a picture of it
//
// PyTorch reads both checkpoints: torch.load(path, weights_only=True)["state_dict"]. So does
// nn.Load.
//
// # Resuming
//
// Run saves last.pt after every epoch, every Config.SaveSteps steps, and when its context ends or a
// hook returns ErrStop. A run that resumes computes what the uninterrupted run would have computed.
// On the CPU, with the same number of threads, the parameters are equal to the last bit; on a GPU
// they are as equal as two runs of the same kernels. Random numbers, for Dropout, go on where they
// were, because last.pt has the states of the generators of the CPU and of the device.
//
// [Checkpoint] is such a file for a loop of the program's own.
package train
