// Command torchstream-lab measures torchstream, and compares it with PyTorch and other peers where
// available.
//
//	torchstream-lab loader -archive FILE  as torchstream bench loader, and other GPU decoders (-peers)
//	torchstream-lab streams               the cost of the stream calls, on a GPU
//	torchstream-lab train                 images and tokens a second in training, compared with PyTorch
//	torchstream-lab operators             the cost of calling an operator, compared with C++
//	torchstream-lab distributed           collectives and training of several processes
//	torchstream-lab serve -images FOLDER  the latency of requests of encoded images to a batch
//	torchstream-lab load -archive FILE    requests a second and latencies of an HTTP server
//	torchstream-lab servers -models FOLDER -archive FILE  torchstream serve, compared with servers in Python
//	torchstream-lab soak -models FOLDER -archive FILE     torchstream serve under good and bad clients
//	torchstream-lab embed -model FILE -archive FILE       torchstream embed, compared with its model alone
//	torchstream-lab resume -archive FILE  the samples of an interrupted run, for lab/resume/resume.py
//
// Output and exit statuses are the same as torchstream's.
package main

import (
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/interrupt"
)

func main() { program().Main(interrupt.Grace) }

func program() *cli.Program {
	return &cli.Program{
		Name:  "torchstream-lab",
		About: "torchstream-lab measures torchstream, beside PyTorch and other peers where there are any.",
		Commands: cli.Commands{Kind: "benchmark", List: []cli.Command{
			{Name: "loader", Args: "-archive FILE",
				About: "torchstream bench loader, and other GPU decoders", Run: benchLoader},
			{Name: "streams", Args: "[-json]", About: "what the stream calls cost, on a GPU", Run: benchStreams},
			{Name: "train", Args: "[-json]",
				About: "images and tokens a second in training, beside PyTorch", Run: benchTrain},
			{Name: "operators", Args: "[-json]", About: "what the call of an operator costs, beside C++",
				Run: benchOperators},
			{Name: "distributed", Args: "[-ranks N]",
				About: "collectives and training of several processes", Run: benchDistributed},
			{Name: "serve", Args: "-images FOLDER",
				About: "the latency of requests of encoded images to a batch", Run: benchServe},
			{Name: "load", Args: "-archive FILE",
				About: "requests a second and latencies of an HTTP server", Run: benchLoad},
			{Name: "servers", Args: "-models FOLDER -archive FILE",
				About: "torchstream serve and servers in Python", Run: benchServers},
			{Name: "soak", Args: "-models FOLDER -archive FILE",
				About: "torchstream serve, loaded for minutes", Run: benchSoak},
			{Name: "embed", Args: "-model FILE -archive FILE",
				About: "torchstream embed, beside its model alone", Run: benchEmbed},
			{Name: "resume", Args: "-archive FILE",
				About: "the samples of an interrupted run, batch by batch", Run: runResume},
		}},
	}
}
