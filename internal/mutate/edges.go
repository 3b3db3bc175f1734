package main

// edge is one ordering edge of the library, the change that leaves it out, and the test that must
// then fail.
type edge struct {
	name     string // as in docs/streams.md
	file     string // path in the repository
	old, new string // old occurs exactly once in the file
	folder   string // the test's folder
	test     string // Go test or GoogleTest that fails without the edge
	gpus     int    // number of GPUs that the test needs
}

// edges lists every place of the library that orders work on one stream, or the host, after work on
// another.
var edges = []edge{
	// ---- the prefetcher's ring, whose code runs on the simulated device
	{"the refill of a host slot waits for copied", "prefetcher/internal/ring/ring.go",
		"	if pending {\n		err = r.dev.HostWait(k, r.hosts[k].copied, stop)\n	}", "	_ = pending", "prefetcher/internal/ring", "TestSchedules", 0},
	{"an enqueued copy is marked as pending", "prefetcher/internal/ring/ring.go",
		"	default:\n		slot.waits = slot.waits[:0]\n		r.hosts[b.host].pending = true", "	default:\n		slot.waits = slot.waits[:0]", "prefetcher/internal/ring", "TestSchedules", 0},
	{"a copy whose finish failed is marked as pending", "prefetcher/internal/ring/ring.go",
		"		r.freeSlots = append(r.freeSlots, b.slot)\n		r.hosts[b.host].pending = true", "		r.freeSlots = append(r.freeSlots, b.slot)",
		"prefetcher/internal/ring", "TestSchedules", 0},
	{"the copy into a device slot waits for released", "prefetcher/internal/ring/ring.go",
		"r.dev.Copy(b.slot, b.host, b.n, slot.waits, ", "r.dev.Copy(b.slot, b.host, b.n, nil, ", "prefetcher/internal/ring", "TestSchedules", 0},
	{"ready is recorded after the finish", "prefetcher/internal/ring/ring.go",
		"	fatal := r.dev.Copy(b.slot, b.host, b.n, slot.waits, r.hosts[b.host].copied)\n	var finish error\n	if fatal == nil {\n		if finish = r.finish(b); finish == nil {\n" +
			"			fatal = r.dev.Record(slot.ready, r.dev.P())\n		}\n	}",
		"	fatal := r.dev.Copy(b.slot, b.host, b.n, slot.waits, r.hosts[b.host].copied)\n	var finish error\n	if fatal == nil {\n" +
			"		if fatal = r.dev.Record(slot.ready, r.dev.P()); fatal == nil {\n			finish = r.finish(b)\n		}\n	}",
		"prefetcher/internal/ring", "TestSchedules", 0},
	{"the consumer's stream waits for ready", "prefetcher/internal/ring/ring.go",
		"	if err == nil && wait {\n", "	if err == nil && wait && false {\n", "prefetcher/internal/ring", "TestSchedules", 0},
	{"a stream named with Use waits for ready", "prefetcher/internal/ring/ring.go",
		"	return r.dev.Wait(stream, ready)\n", "	_ = ready\n	return nil\n", "prefetcher/internal/ring", "TestSchedules", 0},
	{"a release is recorded on a stream named with Use", "prefetcher/internal/ring/ring.go",
		"	l.add(stream)\n	ready := r.slots[l.Slot].ready", "	ready := r.slots[l.Slot].ready", "prefetcher/internal/ring", "TestSchedules", 0},
	{"a release is recorded on the stream that is current at its end", "prefetcher/internal/ring/ring.go",
		"	_, err := l.useCurrent(false)\n", "	var err error\n", "prefetcher/internal/ring", "TestSchedules", 0},
	{"a release is recorded on every stream that used the batch", "prefetcher/internal/ring/ring.go",
		"	for _, s := range streams {\n		if err != nil {", "	for _, s := range streams[:min(1, len(streams))] {\n		if err != nil {", "prefetcher/internal/ring", "TestSchedules", 0},
	{"Close waits for the releases", "prefetcher/internal/ring/ring.go",
		"			events = append(events, r.slots[j].waits...)\n", "			_ = j\n", "prefetcher/internal/ring", "TestSchedules", 0},

	// ---- the prefetcher on a GPU
	{"the GPU's copy waits for released", "prefetcher/device.go",
		"	for _, e := range released {\n		if err := d.p.WaitEvent(e); err != nil {\n			return err\n		}\n	}", "	_ = released", "prefetcher", "TestGPUStress", 1},
	{"the GPU's wait for ready", "prefetcher/device.go", "error   { return s.WaitEvent(e) }", "error   { return nil }", "prefetcher", "TestGPUStress", 1},
	{"the GPU's record of ready and released", "prefetcher/device.go",
		"error { return e.Record(s) }", "error { return e.Record(cuda.DefaultStream(s.Device())) }", "prefetcher", "TestGPUStress", 1},
	{"the GPU's wait for copied", "prefetcher/device.go", "		if done {\n			took", "		if done || true {\n			took", "prefetcher", "TestGPUStress", 1},

	// ---- streams and events
	{"WithStream makes the stream current", "cshim/src/cuda/stream.cc", "    c10::cuda::setCurrentCUDAStream(inner);\n", "", "cuda", "TestEveryGoroutineKeepsItsStream", 1},
	{"WithStream restores the previous stream", "cshim/src/cuda/stream.cc",
		"    c10::cuda::setCurrentCUDAStream(entered.stream);\n", "", "cuda", "TestWithStreamNests", 1},
	{"WithStream locks the goroutine to its thread", "cuda/current.go",
		"	runtime.LockOSThread()\n	guard, err := capi.StreamGuardEnter(s.s)\n	if err != nil {\n		runtime.UnlockOSThread()\n		return checked(err)\n	}",
		"	guard, err := capi.StreamGuardEnter(s.s)\n	if err != nil {\n		return checked(err)\n	}\n	runtime.LockOSThread()\n	runtime.UnlockOSThread()",
		"cuda", "TestEveryGoroutineKeepsItsStream", 1},
	{"SetCUDAStream locks the goroutine to its thread", "cuda/current.go",
		"	runtime.LockOSThread()\n	guard, err := capi.StreamGuardEnter(s.s)\n	if err != nil {\n		runtime.UnlockOSThread()\n		return nil, checked(err)\n	}",
		"	guard, err := capi.StreamGuardEnter(s.s)\n	if err != nil {\n		return nil, checked(err)\n	}", "cuda", "TestEveryGoroutineKeepsItsStream", 1},
	{"Stream.Wait waits", "cshim/src/cuda/order.cc",
		"  if (waiter.device_index() == on.device_index()) {\n    C10_CUDA_CHECK(cudaStreamWaitEvent(waiter.stream(), event, cudaEventWaitDefault));\n",
		"  if (waiter.device_index() == on.device_index()) {\n", "cuda", "TestOrdering", 1},
	{"Stream.Wait records first", "cshim/src/cuda/order.cc",
		"  C10_CUDA_CHECK(cudaEventRecord(event, on.stream()));\n  if (", "  if (", "cuda", "TestOrdering", 1},
	{"Stream.Wait between devices", "cshim/src/cuda/order.cc",
		"    const DeviceScope other(waiter.device_index());\n    C10_CUDA_CHECK(cudaStreamWaitEvent(waiter.stream(), event, cudaEventWaitDefault));\n",
		"    const DeviceScope other(waiter.device_index());\n", "cuda", "TestForkTwoDevices", 2},
	{"Event.Record records", "cshim/src/cuda/event.cc",
		"      cudaEventRecord(event.load(std::memory_order_acquire), stream.stream());\n", "      cudaSuccess;\n", "cuda", "TestOrdering", 1},
	{"Stream.WaitEvent waits", "cshim/src/cuda/event.cc",
		"  C10_CUDA_CHECK(cudaStreamWaitEvent(stream.stream(), event.load(std::memory_order_acquire),\n                                     cudaEventWaitDefault));\n",
		"", "cuda", "TestOrdering", 1},
	{"Event.Synchronize waits", "cshim/src/cuda/event.cc", "  C10_CUDA_CHECK(cudaEventSynchronize(event.load(std::memory_order_acquire)));\n", "", "cuda", "TestOrdering", 1},
	{"Event.Query reports unfinished work", "cshim/src/cuda/event.cc",
		"    C10_CUDA_CLEAR_ERROR();\n    return false;\n", "    C10_CUDA_CLEAR_ERROR();\n    return true;\n", "cuda", "TestQueryAndElapsed", 1},
	{"an event that was never recorded is rejected", "cshim/src/cuda/event.cc",
		"  if (!recorded.load(std::memory_order_acquire)) {", "  if (false) {", "cshim", "EventGpu.UnrecordedIsAnErrorEverywhere", 1},
	{"Stream.Synchronize waits", "cshim/src/cuda/stream.cc", "    on.synchronize();\n", "", "cuda", "TestOrdering", 1},
	{"Device.Synchronize waits", "cshim/src/cuda/device.cc", "    c10::cuda::device_synchronize();\n", "", "cuda", "TestOrdering", 1},
	{"Notify comes after the work", "cshim/src/cuda/notify.cc",
		"cudaLaunchHostFunc(on.stream(), &ts::deliver, notice.get());", "(ts::deliver(notice.get()), cudaSuccess);", "cuda", "TestNotify", 1},
	{"an owned stream has no work of its previous owner", "cshim/src/cuda/stream.cc",
		"      if (status == cudaSuccess) {\n        spare.pop_front();", "      if (status == cudaSuccess || status == cudaErrorNotReady) {\n        spare.pop_front();",
		"cshim", "StreamGpu.AnOwnStreamWithWorkIsNotHandedOut", 1},
	{"Fork records", "cshim/src/cuda/order.cc",
		"  C10_CUDA_CHECK(cudaEventRecord(event, on.stream()));\n  return", "  return", "cuda", "TestFork", 1},
	{"every stream of a Fork waits", "cshim/src/cuda/order.cc",
		"    for (const auto waiter : waiters) ts::wait(waiter, event);\n", "    ts::wait(waiters[0], event);\n", "cuda", "TestFork", 1},
	{"a Fork waits on the other device's default stream", "cshim/src/cuda/order.cc",
		"  const DeviceScope scope(waiter.device_index());\n  C10_CUDA_CHECK(cudaStreamWaitEvent(", "  C10_CUDA_CHECK(cudaStreamWaitEvent(", "cuda", "TestForkTwoDevices", 2},
	{"Join waits for every stream", "cshim/src/cuda/order.cc",
		"    for (const auto source : sources) ts::order_after(waiter, source);\n", "    if (!sources.empty()) ts::order_after(waiter, sources[0]);\n", "cuda", "TestJoin", 1},

	// ---- copies and memory
	{"CopyBatch waits for after", "cshim/src/torch/copy.cc", "    if (after != nullptr) after->block(on);\n", "", "torch", "TestCopyBatchIsOrdered", 1},
	{"CopyBatch records done", "cshim/src/torch/copy.cc",
		"    if (done != nullptr) done->record(on);\n  });\n}", "  });\n}", "torch", "TestCopyBatchIsOrdered", 1},
	{"a slot of a Slab is rejected while it is in flight", "cuda/slab.go",
		"	if busy, err := s.busy(i); err != nil || busy {\n		return nil, inFlight(i, err)\n	}", "", "cuda", "TestSlabInFlight", 0},
	{"a Slab is not freed while it is in flight", "cuda/slab.go",
		"		if busy, err := s.busy(i); err != nil || busy {\n			return inFlight(i, err)\n		}", "		_ = i", "cuda", "TestSlabInFlight", 0},
	{"Slab.Wait waits", "cuda/slab.go", "		errs = append(errs, checked(capi.SynchronizeEvent(f.c)))\n", "", "cuda", "TestSlab", 1},
	{"CopyPeer waits for the receiver", "cshim/src/torch/copy.cc", "    ts::order_after(from, to);\n", "", "torch", "TestCopyPeerIsOrdered", 1},
	{"the receiver waits for CopyPeer", "cshim/src/torch/copy.cc", "    ts::order_after(to, from);\n", "", "torch", "TestCopyPeerIsOrdered", 1},
	{"CopyBatch's kernels are on its stream", "cshim/src/torch/copy.cc", "  const c10::cuda::CUDAStreamGuard current(stream.unwrap());\n", "", "torch", "TestStridedCopiesAreOrdered", 1},
	{"CopyPeer's kernels are on the sender's stream", "cshim/src/torch/copy.cc",
		"      const c10::cuda::CUDAStreamGuard current(from.unwrap());\n", "", "torch", "TestStridedCopiesAreOrdered", 1},
	{"images are normalised on the current stream", "cshim/src/torch/normalize.cc",
		"          c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();",
		"          c10::cuda::getDefaultCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();", "cshim", "NormalizeGpu.RunsOnTheCurrentStream", 1},
	{"RecordStream informs the allocator", "cshim/src/torch/tensor.cc",
		"    ts::record_use(ts::storage_of(value), used_on);\n", "    (void)used_on;\n", "cuda", "TestFreedMemoryAndOtherStreams", 1},

	// ---- graphs
	{"a replay waits for graphs that share its memory", "cshim/src/cuda/graph.cc", "  pool->order.before(on);\n", "", "torch", "TestReplaysOfASharedPoolAreOrdered", 1},
	{"a replay is recorded for graphs that share its memory", "cshim/src/cuda/graph.cc", "  pool->order.after(on);\n", "", "torch", "TestReplaysOfASharedPoolAreOrdered", 1},
	{"a random replay waits for the previous one", "cshim/src/cuda/graph.cc",
		"    order_.before(stream);  // the replay before this one reads what is written here\n", "", "torch", "TestRandomReplaysAreOrdered", 1},
	{"a random replay is recorded for the next", "cshim/src/cuda/graph.cc", "    order_.after(stream);\n", "", "torch", "TestRandomReplaysAreOrdered", 1},

	{"random numbers wait for the end of a capture", "cshim/src/torch/operator.cc",
		"  if (op.random && !captured && works_on_gpu(stack)) turn.emplace();\n", "", "cshim", "OperatorGpu.RandomNumbersWaitForTheEndOfACapture", 1},
	{"a graph keeps its operators' tensors", "cshim/src/torch/operator.cc",
		"    each_tensor(value, [](const at::Tensor& tensor) { hold_in_capture(tensor); });\n", "    (void)value;\n", "torch", "TestGraphKeepsItsOperands", 1},
	{"a graph keeps tensors in lists with gaps", "cshim/src/torch/operator.cc",
		"value.isTensorList() || value.isOptionalTensorList()", "value.isTensorList()", "cshim", "OperatorGpu.AGraphKeepsTheIndicesOfAnIndex", 1},
	{"a graph keeps the source of ts_tensor_copy", "cshim/src/torch/copy.cc", "    ts::hold_in_capture(from);\n", "", "cshim", "GraphGpu.ACapturedCopyKeepsItsTensors", 1},
	{"a graph keeps the destination of ts_tensor_copy", "cshim/src/torch/copy.cc", "    ts::hold_in_capture(to);\n", "", "cshim", "GraphGpu.ACapturedCopyKeepsItsTensors", 1},
	{"a graph keeps the sources of CopyPeer", "cshim/src/torch/copy.cc",
		"        ts::hold_in_capture(transfer.src, from);\n", "", "cshim", "GraphGpu.ACapturedCopyKeepsItsTensors", 1},
	{"a graph keeps the destinations of CopyPeer", "cshim/src/torch/copy.cc",
		"        ts::hold_in_capture(transfer.dst, from);\n", "", "cshim", "GraphGpu.ACapturedCopyKeepsItsTensors", 1},
	{"a closed graph's memory waits for its last replay", "cshim/src/cuda/graph.cc",
		"    if (graph->exec != nullptr) graph->keep_for_replays();\n", "", "cshim", "GraphGpu.OperandsOutliveTheGraphForItsReplays", 1},
	{"a use recorded during a capture takes effect at its end", "cshim/src/cuda/allocator.cc",
		"    allocator::recordStream(use.storage->data_ptr(), use.stream);\n  }\n", "  }\n", "cshim", "GraphGpu.AUseRecordedBesideACaptureCounts", 1},
	{"a graph keeps the sources of CopyBatch", "cshim/src/torch/copy.cc", "        ts::hold_in_capture(transfer.src, on);\n", "", "torch", "TestGraphKeepsWhatItsCopiesRead", 1},
	{"a graph has its own cuBLAS workspace", "cshim/src/cuda/graph.cc",
		"  ts::take_workspaces(at::cuda::cublas_handle_stream_to_workspace(), record.streams, workspaces);\n" +
			"  ts::take_workspaces(at::cuda::cublaslt_handle_stream_to_workspace(), record.streams, workspaces);\n", "", "torch", "TestProductsBesideAGraphOfTheirStream", 1},
	{"waiting for a device waits for the end of a capture", "cshim/src/cuda/capture.cc",
		"  return std::shared_lock<std::shared_mutex>(under_way().turn);\n", "  return {};\n", "cuda", "TestCaptureBesideOtherWork", 1},
	{"a Graphed's own call waits for the caller", "torch/graphed.go",
		"	if err := cuda.Fork(caller, own.Stream); err != nil {", "	if err := error(nil); err != nil {", "torch", "TestGraphedIsOrdered", 1},
	{"the caller waits for a Graphed's own call", "torch/graphed.go",
		"cuda.WithStream(own.Stream, fn), cuda.Join(caller, own.Stream))", "cuda.WithStream(own.Stream, fn))", "torch", "TestGraphedIsOrdered", 1},
	{"a Graphed's result is recorded on the caller's stream", "torch/graphed.go",
		"		if err := t.RecordStream(stream); err != nil {", "		_ = stream\n		if err := error(nil); err != nil {", "torch", "TestGraphedResultsMayBeFreed", 1},

	// ---- Parallel
	{"Parallel forks", "nn/parallel.go", "	if err := eachCaller(lanes, cuda.Fork); err != nil {", "	if err := error(nil); err != nil {", "nn", "TestParallelForksAndJoins", 1},
	{"Parallel joins", "nn/parallel.go", "			err = eachCaller(lanes, cuda.Join)\n", "", "nn", "TestParallelForksAndJoins", 1},
	{"Parallel joins when a branch panics", "nn/parallel.go", "	defer join()\n", "", "nn", "TestParallelPanics", 1},
	{"Parallel's input is recorded on the branch's stream", "nn/parallel.go",
		"	if err := x.RecordStream(l.stream); err != nil {", "	if err := error(nil); err != nil {", "nn", "TestParallelInputMayBeFreed", 1},
	{"Parallel's output is recorded on the caller's stream", "nn/parallel.go", "		err = y.RecordStream(l.caller)\n", "", "nn", "TestParallelOutputMayBeFreed", 1},
}
