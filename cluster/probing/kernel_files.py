"""Shell text for probes that read the kernel's files below /sys and /proc."""

from __future__ import annotations

# `value FILE` leaves the file's first line in $v; `?` where it cannot be read.
VALUE = """
value() { v='?'; [ -r "$1" ] && read -r v <"$1"; }
"""
# `gpus` prints the folder of each GPU: 0x10de is NVIDIA, classes 0x0300 and 0x0302 are its GPUs.
GPUS = f"""{VALUE}
gpus() {{
    for device in /sys/bus/pci/devices/*; do
        value "$device/vendor"; [ "$v" = 0x10de ] || continue
        value "$device/class"; case $v in 0x0300* | 0x0302*) printf '%s\\n' "$device" ;; esac
    done
}}
"""
# Prints the line `machine virtual` or `machine real`.
MACHINE = """
grep -qw hypervisor /proc/cpuinfo && echo 'machine virtual' || echo 'machine real'
"""
