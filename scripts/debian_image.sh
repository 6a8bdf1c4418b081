#!/usr/bin/env bash
# Make a plain Debian a base image of buildah's, where no image registry can be reached. As root.
#
#     scripts/debian_image.sh NAME        nothing is done if there is such an image
set -euo pipefail

for tool in buildah debootstrap; do
    command -v $tool >/dev/null || { echo "image: no $tool: install it (Debian, Ubuntu: apt-get install buildah debootstrap)" >&2; exit 2; }
done
if buildah inspect --type image "$1" >/dev/null 2>&1; then exit; fi
container=$(buildah from scratch)
trap 'buildah rm "$container" >/dev/null' EXIT
# Debian 12 has Python 3.11; --variant=minbase is what Debian's own image is made of.
debootstrap --variant=minbase bookworm "$(buildah mount "$container")"
buildah commit --quiet "$container" "$1"
