//go:build linux && cgo

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/internal/setup"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
)

// weightsOptions is the command line of weights.
type weightsOptions struct {
	model, url, sha256, dict, out string
	named                         bool // sha256 has the first digits of the checksum, from the file's name
}

// weightsCommand downloads published weights.
func weightsCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o weightsOptions
	set := cli.Flags("torchstream weights MODEL -url URL", "Downloads published weights of MODEL ("+
		strings.Join(models.Names(), ", ")+"), verifies their checksum, and converts them to "+
		"safetensors, for train -pretrained, nn.Load and Python.\n"+
		"The file must have every tensor of the network. An interrupted download continues at the next "+
		"call. The publisher's terms apply.", stderr)
	set.StringVar(&o.url, "url", "", "`URL` of a .pth, .pt or .safetensors file (required)")
	set.StringVar(&o.sha256, "sha256", "", "`SUM` that the file must have, all 64 digits (default: only the digits "+
		"at the end of the file's name are verified, as in resnet18-0123abcd.pth)")
	set.StringVar(&o.dict, "dict", "", "`KEY` of the dict with the tensors, such as state_dict_ema "+
		"(default: the file's tensors, or its state_dict)")
	set.StringVar(&o.out, "o", "", "`FILE` to write (default: MODEL.safetensors)")
	if len(args) > 0 && args[0] != "" && args[0][0] != '-' { // options may follow the model
		o.model, args = args[0], args[1:]
	}
	want := 0
	if o.model == "" {
		want = 1
	}
	if err := cli.Parse(set, args, want); err != nil {
		return err
	}
	if o.model == "" {
		o.model = set.Arg(0)
	}
	if err := o.check(); err != nil {
		return err
	}
	return o.run(ctx, stdout, stderr)
}

// sumInName matches the digits of a checksum at the end of a file name without its extension.
var sumInName = regexp.MustCompile(`-([0-9a-f]{8,64})\.\w+$`)

var wholeSum = regexp.MustCompile(`^[0-9a-fA-F]{64}$`)

func (o *weightsOptions) check() error {
	if !slices.Contains(models.Names(), o.model) {
		guess := ""
		if near := cli.Nearest(models.Names(), o.model); near != "" {
			guess = "did you mean " + near + "? "
		}
		return cli.Usagef("weights %q: %swant one of %s", o.model, guess, strings.Join(models.Names(), ", "))
	}
	if o.url == "" {
		return cli.UsageError{Message: "weights needs -url URL, where the weights are published"}
	}
	if o.sha256 != "" && !wholeSum.MatchString(o.sha256) {
		return cli.Usagef("-sha256 %s: want all 64 hexadecimal digits of the file's SHA-256", printable.Name(o.sha256))
	}
	if o.sha256 == "" {
		u, err := url.Parse(o.url)
		if err != nil {
			return cli.Usagef("-url %s: no valid URL", printable.URL(o.url))
		}
		m := sumInName.FindStringSubmatch(path.Base(u.Path))
		if m == nil {
			return cli.UsageError{Message: "weights needs -sha256 SUM: the name of the file does not end in the " +
				"digits of its checksum; the publisher gives it"}
		}
		o.sha256, o.named = m[1], len(m[1]) < 64
	}
	if o.out == "" {
		o.out = o.model + ".safetensors"
	}
	return nil
}

// run downloads, verifies and converts.
func (o *weightsOptions) run(ctx context.Context, stdout, stderr io.Writer) error {
	if err := safefile.Check(o.out, safefile.Safetensors); err != nil {
		return fmt.Errorf("-o: %w", err)
	}
	downloaded := o.out + ".download"
	report, done := cli.DownloadProgress(stderr)
	sum, err := setup.Download(ctx, o.url, downloaded, o.sha256, report)
	done()
	if err != nil {
		return fmt.Errorf("the weights: %w", err)
	}
	verified := "verified by its SHA-256 " + sum
	if o.named {
		verified = fmt.Sprintf("the first %d digits of its SHA-256 are verified, by the file's name: %s (-sha256 SUM "+
			"verifies all)", len(o.sha256), sum)
	}
	loaded, err := o.convert(downloaded, sum)
	if err != nil {
		return fmt.Errorf("%w (the verified download is kept as %s, for another MODEL or -dict)", err,
			printable.Name(downloaded))
	}
	if err := os.Remove(downloaded); err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "%s: %d tensors of %s, %d numbers; %s\n", printable.Name(o.out),
		len(loaded.Loaded), article(o.model), loaded.AllElements, verified)
	return err
}

// convert loads the downloaded file into the network, and saves the network.
func (o *weightsOptions) convert(downloaded, sum string) (_ *nn.LoadReport, err error) {
	net, err := models.ByName(o.model, models.Options{})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, nn.Close(net)) }()
	report, err := nn.LoadWith(downloaded, net, nn.LoadOptions{Dict: o.dict})
	if err != nil {
		return nil, err
	}
	return report, nn.Save(o.out, net, map[string]string{"model": o.model, "source": printable.URL(o.url),
		"sha256": sum})
}
