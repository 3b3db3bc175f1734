# Every target does the set-up that it needs: system packages (apt when root), LibTorch and a CUDA compiler (LIBTORCH=,
# or wheels installed once under TORCHSTREAM_CACHE), and the C++ shim. `make help` lists the targets.
#
#   TORCHSTREAM_LIBTORCH=V install LibTorch V (2.11, which is the default, 2.15, or 2.11-cpu) if LIBTORCH is not set
#   LIBTORCH=DIR           use this LibTorch (2.11 to 2.15): site-packages, its torch folder, or an unpacked libtorch zip
#   TORCHSTREAM_CACHE=DIR  install LibTorch here if LIBTORCH is not set (default ~/.cache/torchstream)
#   ARCHIVE=FILE           make demo: train on this archive or folder of labelled images (TEST= held-back ones, DEVICE=cuda or cpu)
#   PREFIX=DIR             make install: install into this folder
#   FULL=1                 make test, test-newest, test-debug: leave out no test, as make nightly does
#   JOBS=N                 number of concurrent C++ compilations

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

export FULL LIBTORCH TORCHSTREAM_LIBTORCH TORCHSTREAM_CACHE JOBS ARCHIVE TEST DEVICE CHECKPOINT FUZZ_TIME FUZZ_SEEDS

# Built without cgo, torchstream consists of its installer and its doctor, and needs no C compiler. It prints LibTorch's folder.
BOOTSTRAP = CGO_ENABLED=0 GOOS= GOARCH= GOFLAGS=-buildvcs=false GOWORK=off go run ./cmd/torchstream
INSTALL_LIBTORCH = $(BOOTSTRAP) setup -only-libtorch

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r t d; do printf '  make %-14s %s\n' "$$t" "$$d"; done

.PHONY: setup
setup: ## install missing system packages and LibTorch
	@cshim/setup/packages.sh
	@[[ -n "$$LIBTORCH" ]] && ! command -v go >/dev/null || $(INSTALL_LIBTORCH) >/dev/null

.PHONY: image
image: ## build the image library alone, which needs no LibTorch: cshim/build/lib/libtorchstream_image.so
	@cshim/setup/packages.sh image
	@cshim/setup/shim.sh --image

.PHONY: shim
shim: setup ## build the C++ side: libtorchstream.so and libtorchstream_image.so in cshim/build/lib
	@cshim/setup/shim.sh

# PREFIX/include, PREFIX/lib, and a pkg-config file and a CMake package for each library. examples/06-c uses them.
.PHONY: prefix install install-image
prefix:
	@[[ -n "$(PREFIX)" ]] || { echo 'make: error: PREFIX is not set: make $(MAKECMDGOALS) PREFIX=FOLDER' >&2 && exit 1; }

install: prefix shim ## install headers, libraries, pkg-config files and the CMake package below PREFIX=
	cmake --install cshim/build --prefix "$$(realpath -m -- "$(PREFIX)")" --component image
	cmake --install cshim/build --prefix "$$(realpath -m -- "$(PREFIX)")" --component torchstream

install-image: prefix image ## install the image library alone below PREFIX=
	cmake --install cshim/build --prefix "$$(realpath -m -- "$(PREFIX)")" --component image

.PHONY: demo
demo: shim ## train a small network on an archive or folder of photographs (ARCHIVE=), then predict
	@tools/demo.sh

# The race detector makes tests two to ten times slower. With FULL it leaves out none of the packages that start goroutines.
# Otherwise it leaves out tests of one goroutine, and tests that tools/without-libtorch.sh runs too, and -short leaves out
# table rows that start the same goroutines as others.
RACED_PACKAGES = $$(go list ./imageloader/... ./prefetcher/... | grep -vE '/(transform|mask|box)$$')
NOT_RACED = ^(Fuzz|Test(Digests$$|DigestsWithShared|Formats|TIFFEquals|DamagedFormats|EpochsAllocate|DrawsFollow|FeatureTable))
# The tests of distributed that wait for no timeout: jobs of 2 and 3 processes, with FULL=1 also of 8, and ranks in one process.
RACED = Trains?AsOne|^Test(Collectives|Subgroups|Objects|CloseBeside|GradientsAre|NoSync|HooksCome|Scaler|KilledRank|Flag)
# Tests that the tag debug changes.
ORIGINS = ^TestLeaks|^TestOpen(Handles|Tensors|Batches)NameTheir
# The tests of distributed that compute, without those in RACED.
COMPUTED = ^Test(FullySharded|ZeroRedundancy|SyncBatchNorm|ConvertSync|ParametersOutside|ReducedPrecision|UnusedParameters|Buckets)

# -count=1, because Go's test cache knows neither LibTorch nor the driver. -timeout, because the loader's tests take 5 of the
# default's 10 minutes under the race detector on two quiet cores. -p: many tests wait, for processes or timeouts.
.PHONY: test
test: setup ## run all tests: C++, go vet, Go, and loader, prefetcher and jobs of processes under the race detector
	@cshim/setup/shim.sh cshim/build -- all ts_tests
	ctest --test-dir cshim/build --output-on-failure --no-tests=error -j2
	tools/test-install.sh
	go vet ./...
	go test -count=1 -timeout 30m -p $$(($$(nproc) + 1)) ./...
	go test -count=1 -timeout 30m -race $(if $(FULL),,-short -skip "$(NOT_RACED)") $(RACED_PACKAGES)
	go test -count=1 -race $(if $(FULL),,-short) -run "$(RACED)" ./distributed
	go test -count=1 -race -run "^Test(EveryCallReturns|Cancelled|LostDevice|CloseGivesUp|FaultyImageFailsAlone)" ./serve
	cd lab && go test -count=1 -timeout 30m ./...
	cd imageloader/prometheus && go test -count=1 ./...
	cd serve/prometheus && go test -count=1 ./...
	cd serve/opentelemetry && go test -count=1 ./...
	cd imageloader/blob && go test -count=1 ./...

.PHONY: test-debug
test-debug: shim ## run the tests of handles and leaks in builds with the tag debug
	go test -count=1 -tags debug ./internal/origin ./leaks ./cudatest
	go test -count=1 -tags debug -run "$(if $(FULL),.,$(ORIGINS))" ./torch ./cuda ./prefetcher

.PHONY: test-bundle
test-bundle: shim ## make a bundle of a program and run it on a C library alone, which takes root
	@if ((EUID == 0)) && unshare --mount --pid --net --fork true; then tools/bundle-test.sh; \
	else echo "test-bundle: skipped: tools/bundle-test.sh changes the root folder of a process, which needs root"; fi

# .ci/run leaves out checks of which a change touches nothing, and runs some of them in part.
.PHONY: nightly
nightly: shim ## run every check of .ci/run in full, whatever the change touches
	FULL=1 CI_BASE=$$(git hash-object -t tree /dev/null) .ci/run

# CI runs it where there is a Python 3.12.
.PHONY: test-pytorch
test-pytorch: shim ## run the tests that need Python's torch, none of them skipped; needs Python 3.12 with venv
	@tools/test-pytorch.sh

# Where PyTorch's values differ, the tests have those of both versions (optim/testdata). -skip: make test-debug runs these.
.PHONY: test-newest
test-newest: ## test the Go packages that compute with the newest LibTorch, which it installs and builds the shim for
	@cshim/setup/packages.sh
	@LIBTORCH= TORCHSTREAM_LIBTORCH=2.15 cshim/setup/shim.sh cshim/build-2.15
	TORCHSTREAM_LIBRARY="$$PWD/cshim/build-2.15/lib" go test -count=1 -skip "$(if $(FULL),^$$,$(ORIGINS))" ./aoti ./internal/capi ./cuda ./torch ./checkpoint ./nn ./optim
	TORCHSTREAM_LIBRARY="$$PWD/cshim/build-2.15/lib" go test -count=1 $(if $(FULL),,-run "$(COMPUTED)" -skip "$(RACED)") ./distributed $(if $(FULL),./prefetcher ./train)

# LIBTORCH= names an installed LibTorch without CUDA.
.PHONY: test-cpu-only
test-cpu-only: ## build the shim for a LibTorch without CUDA (LIBTORCH=, or 2.11-cpu, which it installs) and run the tests
	@cshim/setup/packages.sh
	@TORCHSTREAM_LIBTORCH=2.11-cpu cshim/setup/shim.sh cshim/build-cpu -- all ts_tests
	ctest --test-dir cshim/build-cpu --output-on-failure --no-tests=error -j2
	TORCHSTREAM_LIBRARY="$$PWD/cshim/build-cpu/lib" go test -count=1 -timeout 30m ./...

# Tests of cuda, cudatest, distributed, models, nn, prefetcher, serve and train, in this order.
NULL_TESTS = ^Test(DeviceWaitsForTheEndOfACapture|BoundedStreams|ErrorsOfGPUsBeginWithTheCall$\
  |MainFailsAfterAFinding|NoFindingsReportsARace|SanitizerOfSharded.*|NormsWithReLUKeepNoMoreMemory$\
  |ParallelHasThePriorityOfItsCaller|NormAndReLUAreTwoKernels$\
  |SanitizerOf(InflatedMembers|BoundedDecoding|Mappings)|MaxMappedBytes.*|RegisterReadOnlyFile|SteadyDecoding.*|RefusedEpochLeavesTheMeasurement$\
  |SanitizerOf(Requests|Batcher)|TwoGPUsServeOneQueue|GPU(RowsAreReadAfterTheirBatch|ImagesEqualHost|OutOfMemoryHalvesBucket)|DeviceJPEGsEqualHost|Precedence(IsOrdered)?)$$

# Tests of GPUs that compare no results of kernels.
.PHONY: test-null-device
test-null-device: export NULL_DEVICES = 2
test-null-device: shim ## run tests for GPUs that compare no results on devices that compute nothing
	@cshim/setup/shim.sh cshim/build -- null_runtime null_driver null_nvjpeg lab_nvjpeg_test torchstream_lab decode_decode_test cuda_sanitizer_test torch_share_test distributed_group_test cuda_graph_test
	go test -count=1 -exec "$$PWD/tools/null-device.sh" -run '^TestSanitizer|^TestBatchNormReLU|^TestBackwardKeepsStreams$$|^TestBackwardOfATiedWeight|^TestBackwardFreesMemoryAsGrad$$|^TestProductsReuseTheHandleSlot$$' ./torch
	go test -count=1 -exec "$$PWD/tools/null-device.sh" -run '^TestSanitizerOnGPUs$$' ./internal/streamprog -sanitized 100
	go test -count=1 -exec "$$PWD/tools/null-device.sh" -run "$(NULL_TESTS)" ./cuda ./cudatest ./distributed ./models ./nn ./prefetcher ./serve ./train
	cd cshim/test && ../../tools/null-device.sh ../build/bin/lab_nvjpeg_test
	cd cshim/test && ../../tools/null-device.sh ../build/bin/cuda_sanitizer_test
	cd cshim/test && ../../tools/null-device.sh ../build/bin/torch_share_test --gtest_filter='ShareGpu.EachDevice*'
	cd cshim/test && ../../tools/null-device.sh ../build/bin/distributed_group_test --gtest_filter='GroupGpu.*'
	cd cshim/test && ../../tools/null-device.sh ../build/bin/cuda_graph_test --gtest_filter='GraphGpu.ReplaysWaitForThoseOfADestroyed*'
	cd cshim/test && ../../tools/null-device.sh ../build/bin/decode_decode_test --gtest_filter='DecodeGpu.*'
	cd lab && go test -count=1 -exec "$$PWD/../tools/null-device.sh" -run '^TestBenchLoaderPeers$$|^TestBenchTrainBesideEngines$$' ./torchstream-lab

# Tests all that a program that imports only imageloader needs.
.PHONY: test-image
test-image: image ## test the loader and the command without LibTorch, with the image library alone
	go test -count=1 ./tensor ./internal/imagecapi ./imageloader/...
	go test -count=1 -run '^Test(CommandLine|Help|Inspect|Index|Preview|BenchLoader$$|WithoutLibTorch)' ./cmd/torchstream
	cd imageloader/prometheus && go test -count=1 ./...
	cd imageloader/blob && go test -count=1 ./...

# tools/without-libtorch.sh runs it in a clone that has no LibTorch.
.PHONY: test-image-short
test-image-short: image
	go vet ./tensor ./internal/imagecapi ./imageloader/...
	go test -count=1 -run '^Test(Digests|Formats)' ./imageloader
	go test -count=1 -run '^Test(CommandLine|Help|Inspect|Index|Preview|BenchLoader$$|WithoutLibTorch)' ./cmd/torchstream
	cd imageloader/blob && go vet ./...

.PHONY: mutate
mutate: shim ## leave out each ordering edge in turn: a test must fail (docs/streams.md has the edges that need a GPU)
	go run ./internal/mutate

# Needs Go alone. Prints the first seed, and the command that repeats a seed that fails.
.PHONY: simulate
simulate: ## run the loader, checkpoints and lost ranks on SEEDS= simulated machines with faults, kills and losses of power (default 10000)
	go run ./internal/simworld -seeds $(or $(SEEDS),10000)

.PHONY: race
race: shim ## run all Go tests under the race detector
	go test -count=1 -timeout 30m -race ./...

.PHONY: asan
asan: setup ## run the image library's tests with the address and undefined-behaviour sanitizers
	@cshim/setup/shim.sh cshim/build-asan -DTS_SANITIZE=ON -- ts_tests
	ctest --test-dir cshim/build-asan --output-on-failure --no-tests=error -j2

.PHONY: lint
lint: shim ## check formatting, layers, complexity, go vet, staticcheck, the C headers, exported symbols, import "C"
	@cshim/setup/packages.sh lint
	@cshim/setup/shim.sh cshim/build -- torchstream_lab
	@tools/lint.sh

.PHONY: tidy
tidy: setup ## run clang-tidy with cshim/.clang-tidy on the C++ sources
	@cshim/setup/packages.sh tidy
	@cshim/setup/shim.sh cshim/build -- all torchstream_lab
	@find cshim/src lab/cshim/src -name '*.cc' -not -path '*/nocuda/*' | sort | xargs -P "$${JOBS:-$$(nproc)}" -n 2 clang-tidy --quiet -p cshim/build \
	  --extra-arg=-Wno-unknown-warning-option --extra-arg=-fno-openmp # clang lacks omp.h

.PHONY: generate
generate: setup ## regenerate the typed operators from LibTorch's native_functions.yaml
	go generate ./...

# `torchstream doctor` itself exits with 1 if something is missing. It tries the libraries if they are built.
.PHONY: doctor
doctor: ## show what is installed, what is missing and how to get it; works before anything is built
	@command -v go >/dev/null || { echo "missing  Go  not in PATH -> install Go 1.25 or newer: https://go.dev/dl" && exit; }; \
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT; \
	if [[ -e cshim/build/lib/libtorchstream_image.so || -n "$${TORCHSTREAM_LIBRARY-}" ]]; then go build -o "$$folder" ./cmd/torchstream; fi || \
	  echo "doctor: the program above does not compile, so no library is tried" >&2; \
	[[ -e "$$folder/torchstream" ]] || $(subst run,build -o "$$folder",$(BOOTSTRAP)); \
	"$$folder/torchstream" doctor || [[ $$? == 1 ]]

# The benchmarks of torchstream itself are a module of their own, which is not released.
.PHONY: lab
lab: shim ## build bin/torchstream-lab, which measures torchstream beside PyTorch and other peers
	@cshim/setup/shim.sh cshim/build -- torchstream_lab
	cd lab && go build -o ../bin/torchstream-lab ./torchstream-lab

.PHONY: bench-loader
bench-loader: shim ## measure the loader and PyTorch, WebDataset, datasets, DALI, SPDL and tf.data on the same cores (ARCHIVE=, BENCH="options of lab/loaders/loaders.py")
	@go build -o bin/torchstream ./cmd/torchstream
	@python3 lab/loaders/loaders.py $(if $(ARCHIVE),-archive "$(ARCHIVE)") $(BENCH)

.PHONY: gpu-bundle
gpu-bundle: shim ## make one folder with all tests, examples and run.sh for a GPU machine without Go
	@tools/gpu-bundle.sh

# LibTorch is not in the archive. `torchstream setup -from ARCHIVE` installs both.
.PHONY: release release-test
release: setup ## make the release archive: libraries, headers, licences, a list of parts, checksums
	@tools/release.py

release-test: setup ## make the release archive in two folders, compare the bytes, and use it
	@tools/release-test.sh

.PHONY: fuzz-bundle
fuzz-bundle: image ## make one folder with all fuzzers and run.sh, for a larger machine without clang and Go
	@tools/fuzz-bundle.sh

.PHONY: fuzz
fuzz: fuzz-bundle ## run every fuzzer for FUZZ_TIME (60) seconds, one per core at a time; findings in out/fuzz
	fuzz-bundle/run.sh $(TARGETS)

.PHONY: libtorch-path
libtorch-path: ## print the folder of LibTorch (like a site-packages), and install LibTorch if needed
	@$(INSTALL_LIBTORCH)

.PHONY: clean
clean: ## remove build outputs and the indexes of archives in this folder; keep LibTorch's cache
	rm -rf cshim/build cshim/build-* gpu-bundle fuzz-bundle release bin
	find . -name '*.tsidx' -not -path '*/testdata/*' -not -path './.git/*' -delete
