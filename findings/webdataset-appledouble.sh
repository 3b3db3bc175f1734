#!/usr/bin/env bash
# webdataset 1.0.2
#
# The tar of macOS writes extended attributes of train/0.jpg as a member train/._0.jpg. WebDataset takes the member for
# a sample with the key "train/" and the field "_0.jpg". A member between train/0.jpg and train/0.cls splits their
# sample in two. In the archive's root WebDataset skips such members.
#
#   train/0:jpg train/:_0.jpg train/0:cls 1:jpg+cls
#
# A loader that drops samples without a label drops every image of the folder that has attributes, without an error.
# COPYFILE_DISABLE=1 in the environment of the tar of macOS avoids it.
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


write("a.tar", "train/0.jpg", "train/._0.jpg", "train/0.cls", "1.jpg", "._1.jpg", "1.cls")
print(*samples("a.tar"))
EOF
)
expect 'train/0:jpg train/:_0.jpg train/0:cls 1:jpg+cls' "$got"
