package arena

import "testing"

func TestBudgetAdmitsOneLargeSample(t *testing.T) {
	b := NewBudget(100, nil)
	if !b.Acquire(500) {
		t.Fatal("a single sample must be admitted")
	}
	done := make(chan bool)
	go func() { done <- b.Acquire(60) }()
	go func() { done <- b.Acquire(60) }()
	b.Release(500)
	<-done
	select {
	case <-done:
		t.Error("120 of 100 bytes are admitted")
	default:
	}
	b.Release(60)
	<-done
	go func() { done <- b.Acquire(60) }()
	b.Stop()
	if <-done {
		t.Error("acquire succeeds after stop")
	}
}
