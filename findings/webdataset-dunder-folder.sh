#!/usr/bin/env bash
# webdataset 1.0.2
#
# WebDataset skips every member whose path starts with a component between double underscores, such as __m__/0.jpg, and
# reports nothing. A folder of that form further down is read, and so is a file such as __a__.jpg.
#
#   b/1:jpg+cls b/__m__/2:jpg+cls __a__:jpg
#
# An archive whose top folder is a class or a split loses all images of the folder. The epoch is shorter, and training
# sees one class fewer. WebDataset's own pattern is the option skip_meta of webdataset.tariterators.tar_file_iterator.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

packages webdataset==1.0.2 numpy==2.4.6
got=$(py <<'EOF'
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


write("a.tar", "__m__/0.jpg", "__m__/0.cls", "b/1.jpg", "b/1.cls", "b/__m__/2.jpg", "b/__m__/2.cls", "__a__.jpg")
print(*samples("a.tar"))
EOF
)
expect 'b/1:jpg+cls b/__m__/2:jpg+cls __a__:jpg' "$got"
