#!/usr/bin/env bash
# webdataset 1.0.2, on tarfile of Python 3.11.7
#
# A .gz file may consist of several gzip members (RFC 1952, section 2.2). gzip, GNU tar and tarfile's mode r:gz read all
# of them. The stream mode of tarfile, which WebDataset uses, ends after the first member.
#
#   one gzip member: 2 of 2 samples; two: ReadError unexpected end of data; tarfile r:gz: 2 members
#
# Joining .gz files with cat, or the parts of an upload in an object store, makes such a file. WebDataset reports a
# truncated archive although the file is whole.
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


def read(name):
    try:
        return f"{len(list(samples(name)))} of 2 samples"
    except tarfile.ReadError as err:
        return f"ReadError {err.args[0].split(' @')[0]}"


write("a.tar", "0.jpg", "1.jpg")
tar = open("a.tar", "rb").read()
open("one.tar.gz", "wb").write(gzip.compress(tar))
open("two.tar.gz", "wb").write(gzip.compress(tar[:700]) + gzip.compress(tar[700:]))
print(f"one gzip member: {read('one.tar.gz')}; two: {read('two.tar.gz')}; "
      f"tarfile r:gz: {len(tarfile.open('two.tar.gz', 'r:gz').getnames())} members")
EOF
)
expect 'one gzip member: 2 of 2 samples; two: ReadError unexpected end of data; tarfile r:gz: 2 members' "$got"
