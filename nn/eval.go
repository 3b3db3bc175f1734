package nn

// Eval puts all modules in m into evaluation mode, and returns the function that restores their
// modes:
//
//	defer nn.Eval(net)()
//
// restore can read the modes of this package's modules, and of a program's [Moder] that has a
// method Training() bool: each of these gets the mode that it had. Every other Moder is put into
// training mode if one of these modules was in training mode, or if there are none. No other
// goroutine may use or change m's modes between Eval and restore. To change modes for good, call
// [Train].
func Eval(m Module) (restore func()) {
	type mode struct {
		module   Moder
		training bool
	}
	var known []mode
	var others []Moder
	training := false
	walk("", m, func(_ string, m Module, _ Parts) {
		s, ok := m.(Moder)
		if !ok {
			return
		}
		var was bool
		switch s := m.(type) {
		case interface{ training() bool }:
			was = s.training()
		case interface{ Training() bool }:
			was = s.Training()
		default:
			others = append(others, m.(Moder))
			return
		}
		known = append(known, mode{s, was})
		training = training || was
	})
	Train(m, false)
	return func() {
		for _, k := range known {
			k.module.SetTraining(k.training)
		}
		for _, o := range others {
			o.SetTraining(training || len(known) == 0)
		}
	}
}
