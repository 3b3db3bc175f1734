# A program of your own module as an image. LibTorch and torchstream's libraries, 2.6 GB to download and 3.5 GB installed,
# are in a layer that depends on the clone of torchstream alone: a change of your source builds and pushes only your program.
#
#   docker build -f own-module.Dockerfile --build-context torchstream=../torchstream -t photos .   # in your module's root
#   docker run --rm --gpus all photos
#
# torchstream=DIR is a clone of torchstream. Your go.mod requires github.com/torchstream/torchstream, with any version or
# replacement: the image uses the clone. PROGRAM is the package to build. The machine needs nothing but Docker, with
# BuildKit; for GPUs the driver 580 or newer.

FROM golang:1.25-bookworm AS libraries
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends cmake g++ libgtest-dev libjpeg-dev libpng-dev libwebp-dev make ninja-build pkg-config zlib1g-dev && rm -rf /var/lib/apt/lists/*
COPY --from=torchstream . /torchstream
WORKDIR /torchstream
# 2.11-cpu is LibTorch without CUDA, for machines without GPUs.
ARG TORCHSTREAM_LIBTORCH=2.11
RUN make shim
# The bundle of the command has the libraries of every program. A program finds them in ../lib.
RUN go build -o /build/torchstream ./cmd/torchstream && /build/torchstream bundle /build/torchstream -o /bundle

FROM libraries AS build
WORKDIR /src
# If your go.mod asks for a newer Go than the image's, the go command downloads it.
ENV GOTOOLCHAIN=auto
# The modules that you use are downloaded anew only if go.mod or go.sum change.
COPY go.mod go.sum ./
RUN go mod edit -replace github.com/torchstream/torchstream=/torchstream && go mod download
COPY . .
ARG PROGRAM=.
RUN go mod edit -replace github.com/torchstream/torchstream=/torchstream && go build -trimpath -o /build/program "$PROGRAM"

FROM debian:12-slim
COPY --from=libraries /bundle /app
COPY --from=build /build/program /app/bin/program
WORKDIR /app
USER 65534:65534
ENTRYPOINT ["/app/bin/program"]
