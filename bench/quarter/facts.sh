# Raw facts of the machine, for tests of later days: bash facts.sh FILE. Nothing here may fail.
show() { printf '\n##### %s\n' "$*"; timeout 20 "$@" 2>&1; }
{
    show uname -a; show cat /etc/os-release; show ldd --version; show nproc; show free -g; show df -h / /dev/shm /tmp
    show lscpu; show ip -br address; show cat /etc/hosts; show hostname
    show nvidia-smi; show nvidia-smi -q; show nvidia-smi topo -m; show nvidia-smi topo -p2p r; show nvidia-smi nvlink -s
    show nvidia-smi --format=csv \
        --query-gpu=index,uuid,name,pci.bus_id,mig.mode.current,compute_mode,clocks.sm,clocks.max.sm,power.limit
    show bash -c 'command -v -a python3 mpirun mpicxx horovodrun torchrun pytest nvcc cmake gcc g++ nsys ncu git ssh; true'
    show python3 -m pip list; show python3 -c 'import sys; print(sys.path, sys.prefix, sys.base_prefix)'
    show mpirun --version; show nvcc --version; show gcc --version; show cat /proc/driver/nvidia/version
    show bash -c 'for d in /sys/bus/pci/devices/*; do case $(cat $d/class) in 0x03*|0x02*|0x06*)
        echo "$d $(cat $d/class $d/vendor $d/device $d/numa_node $d/current_link_speed $d/current_link_width 2>/dev/null | xargs)
        $(readlink -f $d)" ;; esac; done'
    show bash -c 'ls -l /dev/nvidia*; cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/memory.max /proc/self/limits'
} >>"$1"
exit 0
