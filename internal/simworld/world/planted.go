package world

// planted is the number of the fault that runs have; 0: none.
var planted int

// Plant plants the fault with a number into all runs from now on; 0: none.
func Plant(fault int) { planted = fault }

// Planted reports whether a fault is planted. Functions of a program with faults call it.
func Planted(fault int) bool { return planted == fault }
