// Package hostmem shares memory between processes of one host and user, such as the ranks of a job
// that read the same archive.
//
// The memory is an anonymous file (memfd_create). A process finds it through a Unix socket with an
// abstract name (unix(7)), which is made from the memory's name. The process that holds the socket
// sends the file to those that connect. When it ends, one of the others takes the socket over.
//
// Neither the file nor the socket has a name in a file system, so killed processes leave nothing
// behind. The system frees the memory when the last process has closed it.
package hostmem

// Config describes the memory. All processes that share it must give the same values.
type Config struct {
	Name  string // up to 80 bytes of ASCII
	Flags int    // number of flags
	Bytes int64  // size of the data
}
