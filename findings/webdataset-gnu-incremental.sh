#!/usr/bin/env bash
# webdataset 1.0.2, on tarfile of Python 3.11.7 (needs GNU tar)
#
# In an archive of tar --listed-incremental, a header holds the access time in the bytes where POSIX has the name's
# prefix. tarfile reads the time as a folder, although the header's magic is GNU's. GNU tar lists the right names.
#
#   GNU tar: cat/0.jpg; webdataset key: ATIME/cat/0   (ATIME is 11 octal digits)
#
# With the top folder as the class, the classes of an incremental backup are times: two images of one folder get two
# classes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tar --version 2>/dev/null | grep -q 'GNU tar' || { echo "$name: error: needs GNU tar" >&2 && exit 1; }
packages webdataset==1.0.2 numpy==2.4.6
mkdir cat
echo data >cat/0.jpg
tar --listed-incremental=list --format=gnu -cf a.tar cat
got="GNU tar: $(tar -tf a.tar | grep jpg); webdataset key: $(py <<'EOF'
import re
import webdataset

for sample in webdataset.WebDataset("a.tar", shardshuffle=False):
    print(re.sub(r"^[0-7]{11}/", "ATIME/", sample["__key__"]))
EOF
)"
expect 'GNU tar: cat/0.jpg; webdataset key: ATIME/cat/0' "$got"
