// Package distributed trains on several GPUs and hosts: one process for each GPU, started by
// torchrun, a Kubernetes training operator, SLURM, Open MPI or a shell loop. It drives c10d, the
// engine that LibTorch carries: NCCL for tensors on GPUs, Gloo for tensors on the CPU, TCPStore to
// meet.
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
// A job ends as a whole. When a rank's process ends, stops, cancels its context, or does not come
// to a collective in time, every call of every rank fails, with an [Error] that has the rank at
// fault and the collective; nothing waits longer than Options says:
//
//   - the end of a process: at once, through a connection that it held;
//   - a process that is stopped, or a network that is cut: after Options.Silence;
//   - a rank that goes on, but does not come to a collective: after Options.Timeout;
//   - on a GPU a collective returns before it is done: the error comes with the next call, with
//     [Work.Wait], or from [Group.Err]. Kernels of NCCL that wait for a lost rank are aborted, so
//     that synchronising with the device does not hang.
//
// After a failure the process closes the group and ends; a launcher that restarts jobs starts it
// anew.
package distributed
