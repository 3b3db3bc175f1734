// Package distributed trains on several GPUs and hosts, with one process for each GPU. torchrun, a
// Kubernetes training operator, SLURM, Open MPI or a shell loop starts the processes. The package
// drives c10d, which is part of LibTorch: NCCL for tensors on GPUs, Gloo for tensors on the CPU,
// and TCPStore, a key-value store on rank 0's host or the launcher's, for the rendezvous.
//
//	world, err := distributed.Init(ctx, distributed.Options{})
//	if err != nil {
//		return err
//	}
//	defer world.Close()
//	err = world.AllReduce(t, distributed.Average)
//
// # Failures
//
// A job ends as a whole. Every call on every rank fails if a rank's process ends or is suspended,
// if it cancels its context, or if it does not enter a collective in time. The [Error] names the
// rank at fault and the collective. No call waits longer than Options allows:
//
//   - A process ends: the other ranks notice at once, because its connection closes.
//   - A process is suspended (SIGSTOP), or the network is cut: after Options.Silence.
//   - A rank still runs but does not enter a collective: after Options.Timeout.
//   - A collective on a GPU fails after its call has returned: [Work.Wait],
//     [Group.Err] and the next collective return the error. NCCL kernels that wait for a lost rank
//     are aborted, so synchronising with the device does not hang.
//
// After a failure, close the group and exit. A launcher that restarts jobs then starts the process
// again.
//
// # Checkpoints
//
// If the ranks shard the model or the optimizer, each rank writes one file of a checkpoint. Package
// checkpoint chooses the files' names (rankfiles.go).
package distributed
