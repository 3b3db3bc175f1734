package capi

// OwnNumerics returns the flags of a call with these switches (NumericsMatmulTF32 ...).
func OwnNumerics(switches int32) int32 {
	return switches*numericsOn + (numericsAll&^switches)*numericsOff
}

// NumericsOf returns the switches of flags that OwnNumerics returned.
func NumericsOf(flags int32) int32 { return flags / numericsOn & numericsAll }
