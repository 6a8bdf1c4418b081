#!/bin/sh
# What the image starts: any command as it is, or `sshd`, which serves ssh for ranks from other hosts.
#
# Containers that share the folder ~/.ssh trust each other and nobody else. What is missing in it is made at the first
# start: one login key for all of them, and this host's own key in known_hosts. SSH_PORT (22) is the same for all;
# with the host's network (--network=host) take one above 1023 that the host's own sshd does not have. Where the folder
# cannot be written, as Kubernetes mounts it, it holds the login key already.
set -eu
[ "${1:-}" = sshd ] || exec "$@"
port=${SSH_PORT:-22}
keys=$HOME/.ssh
host_key=$HOME/host_key # not in the shared folder: it is this host's alone
strict=no # Kubernetes opens its folder to all users of the pod, who are one

[ -e "$host_key" ] || ssh-keygen -q -t ed25519 -N '' -C '' -f "$host_key"
if [ -w "$keys" ]; then
    strict=yes
    if ! [ -e "$keys/id_ed25519" ]; then
        # Several hosts may come here at once: the first link wins, and the public half is derived from it.
        new=$(mktemp -u "$keys/new.XXXXXX")
        ssh-keygen -q -t ed25519 -N '' -C hvdtrain -f "$new"
        ln "$new" "$keys/id_ed25519" 2>/dev/null || true
        rm "$new" "$new.pub"
    fi
    [ -e "$keys/authorized_keys" ] || ssh-keygen -y -f "$keys/id_ed25519" >"$keys/authorized_keys"
    [ -e "$keys/config" ] || echo "Port $port" >"$keys/config"
    known="$(hostname),$(hostname -I | xargs | tr ' ' ,) $(cat "$host_key.pub")"
    grep -qsxF "$known" "$keys/known_hosts" || echo "$known" >>"$keys/known_hosts"
fi

# An unprivileged sshd needs no configuration of the system's, and lets in nobody but this user.
exec /usr/sbin/sshd -D -e -f /dev/null -p "$port" -h "$host_key" -o "StrictModes=$strict" \
    -o PidFile=none -o UsePAM=no -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o "SetEnv=PATH=$PATH"
