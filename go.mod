module github.com/torchstream/torchstream

go 1.25.0
