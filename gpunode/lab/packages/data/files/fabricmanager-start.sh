#!/bin/sh
# Starts and stops the (simulated) fabric manager; on NVLink 5 systems the subnet manager goes first.
set -eu
mode= config= pid=
while [ $# -gt 0 ]; do
    case $1 in
        --mode) mode=$2; shift 2 ;;
        --fm-config-file) config=$2; shift 2 ;;
        --fm-pid-file) pid=$2; shift 2 ;;
        *) echo "unknown option $1" >&2; exit 2 ;;
    esac
done
sm=/opt/nvidia/nvlsm/sbin/nvlsm
nvlink5() { cat /sys/class/infiniband/*/device/vpd 2>/dev/null | grep -q SW_MNG; }
case $mode in
    precheck)
        nvlink5 || exit 0
        command -v ibstat >/dev/null || { echo "ibstat not found: install infiniband-diags" >&2; exit 1; }
        grep -qs "^ib_umad " /proc/modules /run/gpunode-lab/proc-modules || {
            echo "Kernel module \"ib_umad\" has not been loaded, fabric manager cannot be started" >&2
            exit 1
        }
        ;;
    start)
        mkdir -p "$(dirname "$pid")"
        if nvlink5; then
            echo "Detected NVL5+ system"
            [ -x "$sm" ] || { echo "NVLink 5 system without $sm: install nvlsm" >&2; exit 1; }
            "$sm" --guid 0x0 --pid_file /var/run/nvidia-fabricmanager/nvlsm.pid --config /usr/share/nvidia/nvlsm/nvlsm.conf -B
        else
            echo "Detected Pre-NVL5 system"
        fi
        exec /usr/bin/nv-fabricmanager -c "$config" -p "$pid"
        ;;
    stop)
        [ ! -s "$pid" ] || kill "$(cat "$pid")" 2>/dev/null || true
        sm_pid=/var/run/nvidia-fabricmanager/nvlsm.pid
        [ ! -s "$sm_pid" ] || kill "$(cat "$sm_pid")" 2>/dev/null || true
        ;;
    *) echo "--mode precheck, start or stop" >&2; exit 2 ;;
esac
