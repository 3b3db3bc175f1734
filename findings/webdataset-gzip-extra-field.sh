#!/usr/bin/env bash
# webdataset 1.0.2, on tarfile of Python 3.11.7
#
# A gzip header may have an extra field (RFC 1952, FEXTRA), for example in files of bgzip. The stream mode of tarfile,
# which WebDataset uses, reads the field as compressed data. It reads the same archive without the field. The mode r:gz
# of tarfile reads both.
#
#   no field: 1 sample; extra field: ReadError invalid compressed data; tarfile r:gz: 2 members
#
# bgzip is a common way to a seekable .tar.gz. WebDataset reads no sample of one.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages webdataset==1.0.2 numpy==2.4.6
got=$(py <<'EOF'
import gzip
import io
import tarfile

import webdataset


def write(name, *members):
    with tarfile.open(name, "w") as tar:
        for member in members:
            info = tarfile.TarInfo(member)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"data"))


def samples(name):
    for sample in webdataset.WebDataset(name, shardshuffle=False):
        yield sample["__key__"] + ":" + "+".join(k for k in sample if not k.startswith("__"))


write("a.tar", "0.jpg", "0.cls")
tar = open("a.tar", "rb").read()
plain = gzip.compress(tar, mtime=0)
assert plain[3] == 0, "the header has other fields"
field = b"\x06\0" + b"BC\x02\0\0\0"  # the length of the field; one subfield, as bgzip has it
extra = plain[:3] + b"\x04" + plain[4:10] + field + plain[10:]
assert gzip.decompress(extra) == tar, "the file is not valid"
open("plain.tar.gz", "wb").write(plain)
open("extra.tar.gz", "wb").write(extra)
try:
    result = f"{len(list(samples('extra.tar.gz')))} samples"
except tarfile.ReadError as err:
    result = f"ReadError {err.args[0]}"
print(f"no field: {len(list(samples('plain.tar.gz')))} sample; extra field: {result}; "
      f"tarfile r:gz: {len(tarfile.open('extra.tar.gz', 'r:gz').getnames())} members")
EOF
)
expect 'no field: 1 sample; extra field: ReadError invalid compressed data; tarfile r:gz: 2 members' "$got"
