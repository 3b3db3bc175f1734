package nn

// Eval puts all modules in m into evaluation mode, and returns the function that restores their
// modes:
//
//	defer nn.Eval(net)()
//
// A [Moder] of a program that has a method Training() bool gets its own mode back. Others get
// training mode if any other module of m was in training mode. No other goroutine may use m's modes
// until the call of restore. [Train] changes modes for good.
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
