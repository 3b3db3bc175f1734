// Package system wraps calls of the operating system that package os lacks, so that the packages
// above compile everywhere. On a system without a call, the call returns an error that wraps
// errors.ErrUnsupported.
//
// Descriptors are the results of os.File.Fd or SyscallConn.
package system
