package nn

import "github.com/torchstream/torchstream/torch"

// copied returns a copy of a parameter, which may be nil.
func copied(t *torch.Tensor) *torch.Tensor {
	if t == nil || t.Err() != nil {
		return t
	}
	values := t.Detach()
	defer values.Close()
	c := values.Clone()
	if c.Err() != nil {
		return c
	}
	if err := c.SetRequiresGrad(t.RequiresGrad()); err != nil {
		c.Close()
		return torch.Fail("nn.copy", err)
	}
	return c
}

// like copies the kind and source line of another layer.
func (l *layer) like(of *layer) { l.kind, l.made = of.kind, of.made }

func (l *Linear) copy() *Linear {
	c := &Linear{Weight: copied(l.Weight), Bias: copied(l.Bias)}
	c.like(&l.layer)
	return c
}

func (l *LayerNorm) copy() *LayerNorm {
	c := &LayerNorm{Weight: copied(l.Weight), Bias: copied(l.Bias), shape: l.shape, eps: l.eps}
	c.like(&l.layer)
	return c
}

func (d *Dropout) copy() *Dropout {
	c := &Dropout{p: d.p, drop: d.drop}
	c.like(&d.layer)
	c.SetTraining(d.training())
	return c
}

func (a *MultiheadAttention) copy() *MultiheadAttention {
	c := &MultiheadAttention{
		InProjWeight: copied(a.InProjWeight), InProjBias: copied(a.InProjBias), size: a.size, heads: a.heads, o: a.o,
	}
	if a.OutProj != nil { // the constructor succeeded
		c.OutProj = a.OutProj.copy()
	}
	c.like(&a.layer)
	c.SetTraining(a.training())
	return c
}
