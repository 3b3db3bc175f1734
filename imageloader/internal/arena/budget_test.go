package arena

import "testing"

func TestBudgetAdmitsOneLargeSample(t *testing.T) {
	b := NewBudget(100, nil)
	if !b.Acquire(500) {
		t.Fatal("Acquire(500) of an unused budget of 100 bytes = false, want true")
	}
	done := make(chan bool)
	go func() { done <- b.Acquire(60) }()
	go func() { done <- b.Acquire(60) }()
	b.Release(500)
	<-done
	select {
	case <-done:
		t.Error("the budget has admitted 120 bytes, want at most 100")
	default:
	}
	b.Release(60)
	<-done
	go func() { done <- b.Acquire(60) }()
	b.Stop()
	if <-done {
		t.Error("Acquire after Stop = true, want false")
	}
}
