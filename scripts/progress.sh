# Sourced by set-up scripts: one line on standard error says how far a long step is.
#
#     start_progress NAME COMMAND    prints "NAME: what COMMAND prints, m:ss" each second on a terminal, each 30 s in a log
#     end_progress

progress_pid=
clear_line() { if [ -t 2 ]; then printf '\r\033[K' >&2; fi; }
# show_progress NAME SECOND TEXT
show_progress() {
    if [ -t 2 ]; then
        printf '\r\033[K%s: %s, %d:%02d' "$1" "$3" $(($2 / 60)) $(($2 % 60)) >&2
    elif [ $(($2 % 30)) = 0 ]; then
        printf '%s: %s, %d:%02d\n' "$1" "$3" $(($2 / 60)) $(($2 % 60)) >&2
    fi
}
start_progress() {
    (
        exec 9>&- >/dev/null # nothing that waits for the caller's files waits for this
        for ((second = 1; ; second++)); do
            sleep 1 2>/dev/null
            kill -0 $$ 2>/dev/null || exit
            show_progress "$1" "$second" "$("$2" 2>/dev/null || true)"
        done
    ) &
    progress_pid=$!
    disown # or bash reports its end
}
end_progress() {
    [ -z "$progress_pid" ] || kill "$progress_pid" 2>/dev/null || true
    progress_pid=
    clear_line
}
