#!/usr/bin/env bash
# Reports by its exit status whether a change touches a file whose path matches an extended regular expression.
#
#   touched.sh REGEXP
#
# The change is everything since the commit CI_BASE. Without CI_BASE it is everything since the day before the newest
# commit. Where the clone does not have that commit, the change touches every file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
base=${CI_BASE:-$(git rev-list -1 --before="$(($(git log -1 --format=%ct) - 86400))" HEAD)}
git cat-file -e "${base:-none}" 2>/dev/null || exit 0
git diff --name-only "$base" | grep -E "$1" >/dev/null
