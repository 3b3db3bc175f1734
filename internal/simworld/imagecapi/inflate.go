package imagecapi

// Inflater inflates a deflate stream.
type Inflater struct{}

// NewInflater returns an inflater that records checkpoints at this spacing, or none at 0.
func NewInflater(spacing uint64) (*Inflater, error) { return nil, unsupported() }

// FreeInflater does nothing.
func FreeInflater(*Inflater) {}

// ResetInflater starts a stream.
func ResetInflater(i *Inflater, skipBits, history int) error { return unsupported() }

// Inflate inflates input into buffer from at on.
func Inflate(i *Inflater, input []byte, last bool, buffer []byte, at int) (consumed, produced int, done bool, err error) {
	return 0, 0, false, unsupported()
}

// NextInflateCheckpoint returns the next complete checkpoint.
func NextInflateCheckpoint(*Inflater) (c InflateCheckpoint, found bool, err error) {
	return c, false, nil
}

// FollowInflater fails.
func FollowInflater(*Inflater, int, int) error { return unsupported() }

// SettleInflater fails.
func SettleInflater(*Inflater, []byte, int, int64) error { return unsupported() }

// FinishInflater fails.
func FinishInflater(*Inflater, []byte, []InflateCopy) error { return unsupported() }

// StopInflaterAt fails.
func StopInflaterAt(*Inflater, uint64) error { return unsupported() }

// GetInflateState fails.
func GetInflateState(*Inflater) (InflateState, error) { return InflateState{}, unsupported() }

// FindInflate finds nothing.
func FindInflate([]byte, uint64, uint64) (bit uint64, kind int, err error) {
	return 0, FoundNone, nil
}
