package index

import (
	"encoding/binary"
	"log/slog"
	"os"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/indextest"
)

// TestIndexOfOldVersionIsRebuilt: an index of version 2 is made again, because its labels may be
// wrong. The labels of an index of version 3 are used without a check.
func TestIndexOfOldVersionIsRebuilt(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t,
		archivetest.Member{Name: "0.png", Data: archivetest.Image("0")}, archivetest.Member{Name: "0.cls", Data: "3"}))
	var log logged
	c := testConfig()
	c.WebDataset, c.Logger = true, slog.New(slog.NewTextHandler(&log, nil))
	closeIndex(t, open(t, path, c))
	made, err := os.ReadFile(path + sidecarSuffix)
	if err != nil {
		t.Fatal(err)
	}
	forged := indextest.Forge(t, made, indextest.Directories, func(b []byte) { b[4] = '4' })
	for version, want := range map[uint32]int{2: 3, 3: 4} {
		binary.LittleEndian.PutUint32(forged[8:], version)
		indextest.Reseal(forged)
		if err := os.WriteFile(path+sidecarSuffix, forged, 0o644); err != nil {
			t.Fatal(err)
		}
		x := open(t, path, c)
		if got := x.Label(0); got != want {
			t.Errorf("version %d: label %d, want %d", version, got, want)
		}
		closeIndex(t, x)
		now, err := os.ReadFile(path + sidecarSuffix)
		if err != nil || binary.LittleEndian.Uint32(now[8:]) != 3 {
			t.Errorf("version %d: the index now has version %d, error %v, want 3", version,
				binary.LittleEndian.Uint32(now[8:]), err)
		}
	}
	if !log.has("index is made again") {
		t.Errorf("no log line about the old index in\n%s", &log.text)
	}
}
