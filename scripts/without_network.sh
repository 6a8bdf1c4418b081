#!/usr/bin/env bash
# Run a command with no network interface but the loopback: scripts/without_network.sh COMMAND...
set -euo pipefail
user=()
if [ "$(id -u)" != 0 ]; then user=(--user --map-root-user); fi
exec unshare "${user[@]}" --net sh -c 'ip link set lo up && exec "$@"' sh "$@"
