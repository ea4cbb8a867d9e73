#!/bin/sh
# Stands for nvidia-cuda-mps-control. FAKE_MPS: how it behaves. Writes the ids of its processes to $FAKE_MPS_PIDS.
pipes=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -f ]; then
    case $FAKE_MPS in
        fail) echo "MPS is not permitted here"; exit 1 ;;
        silent) echo $$ >>"$FAKE_MPS_PIDS"; exec sleep 1000 ;;
    esac
    # the server is in a session of its own, so that no signal to a process group reaches it
    setsid sleep 1000 &
    server=$!
    echo $$ >>"$FAKE_MPS_PIDS"
    echo $server >>"$FAKE_MPS_PIDS"
    echo $server >"$FAKE_MPS_PIDS.server"
    trap 'kill $server; exit 0' TERM
    echo "devices: $CUDA_VISIBLE_DEVICES."
    echo $$ >"$pipes/control.new"
    mv "$pipes/control.new" "$pipes/control"
    wait $server
    exit 0
fi
read -r line
[ "$FAKE_MPS" = mute ] && echo $$ >>"$FAKE_MPS_PIDS" && exec sleep 1000
[ -f "$pipes/control" ] && kill -0 "$(cat "$pipes/control")" || exit 1
case $line in
    quit*) echo "$line" >>"$FAKE_MPS_PIDS.quit"; kill -TERM "$(cat "$pipes/control")" ;;
esac
