// A LibTorch without CUDA lacks this header, which its build writes for one with CUDA. Empty: the
// functions of c10/cuda are defined in this library, by nocuda/absent.cc.
