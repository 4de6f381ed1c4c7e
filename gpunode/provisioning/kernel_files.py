"""Files of the role kernel_tuning on a node: configuration, units, and the programs that they start."""

from collections.abc import Mapping

MARK = "Managed by gpunode (role kernel_tuning)"
SYSCTL = "/etc/sysctl.d/90-gpunode.conf"
LIMITS = "/etc/security/limits.d/90-gpunode.conf"
SYSTEM = "/etc/systemd/system.conf.d/90-gpunode.conf"
USER = "/etc/systemd/user.conf.d/90-gpunode.conf"
HUGEPAGES = "/etc/tmpfiles.d/gpunode-kernel-tuning.conf"
MODULES = "/etc/modprobe.d/gpunode-kernel-tuning.conf"
GRUB = "/etc/default/grub.d/90-gpunode.cfg"
CPU_UNIT, ACS_UNIT = "gpunode-cpu.service", "gpunode-acs.service"
UNITS = "/etc/systemd/system"
PROGRAMS = "/usr/local/libexec/gpunode"
CPU_PROGRAM, ACS_PROGRAM = f"{PROGRAMS}/cpu-tuning", f"{PROGRAMS}/acs"
THP = "/sys/kernel/mm/transparent_hugepage/enabled"


def sysctl(values: Mapping[str, str]) -> str:
    """Return the drop-in for sysctl.d."""
    return f"# {MARK}\n" + "".join(f"{name} = {value}\n" for name, value in values.items())


def limits() -> str:
    """Return limits for logins; PAM excludes root from the wildcard."""
    lines = [
        f"{domain} - {item} {value}\n"
        for domain in ("*", "root")
        for item, value in (("memlock", "unlimited"), ("nofile", "1048576"))
    ]
    return f"# {MARK}: RDMA and pinned memory are locked memory; data loaders open many files.\n" + "".join(lines)


def manager() -> str:
    """Return systemd's default for services, which do not start through PAM."""
    return f"# {MARK}: services get what logins get by limits.d.\n[Manager]\nDefaultLimitMEMLOCK=infinity\n"


def hugepages(word: str) -> str:
    """Return the line for systemd-tmpfiles that writes the setting at boot."""
    return f"# {MARK}\nw {THP} - - - - {word}\n"


def module_options(options: Mapping[str, str]) -> str:
    """Return options of kernel modules for modprobe.d."""
    return f"# {MARK}\n" + "".join(f"options {module} {words}\n" for module, words in sorted(options.items()))


def grub(arguments: tuple[str, ...]) -> str:
    """Return the drop-in that update-grub reads."""
    return f'# {MARK}\nGRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {" ".join(arguments)}"\n'


def cpu_unit(governor: str, latency_us: str) -> str:
    """Return the unit that sets governor and idle states of processors at boot; an empty value is not set."""
    return f"""\
# {MARK}
[Unit]
Description=Set the frequency governor and sleep states of processors
ConditionVirtualization=!container
ConditionPathExistsGlob=|/sys/devices/system/cpu/cpufreq/policy*
ConditionPathExistsGlob=|/sys/devices/system/cpu/cpu*/cpuidle/state*
After=systemd-modules-load.service cpupower.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh {CPU_PROGRAM} apply "{governor}" "{latency_us}"
ExecStop=/bin/sh {CPU_PROGRAM} restore
TimeoutStartSec=60
TimeoutStopSec=60

[Install]
WantedBy=multi-user.target
"""


CPU = f"""\
#!/bin/sh
# {MARK}: apply GOVERNOR LATENCY_US, or restore what was there before.
set -eu
before=/run/gpunode/cpu-before

remember() {{
    grep -q "^$1 " "$before" 2>/dev/null || echo "$1 $(cat "$1")" >> "$before"
}}

put() {{
    remember "$1"
    if ! echo "$2" 2>/dev/null > "$1"; then
        echo "$1 does not take $2" >&2
        refused=1
    fi
}}

apply() {{
    mkdir -p /run/gpunode
    if [ -n "$1" ]; then
        for policy in /sys/devices/system/cpu/cpufreq/policy*; do
            [ -e "$policy/scaling_governor" ] || continue
            case " $(cat "$policy/scaling_available_governors" 2>/dev/null) " in
                *" $1 "*) put "$policy/scaling_governor" "$1" ;;
                *) echo "$policy has no governor $1" >&2; refused=1 ;;
            esac
        done
    fi
    if [ -n "$2" ]; then
        for state in /sys/devices/system/cpu/cpu[0-9]*/cpuidle/state*; do
            [ -e "$state/latency" ] || continue
            if [ "$(cat "$state/latency")" -gt "$2" ]; then put "$state/disable" 1; fi
        done
    fi
}}

restore() {{
    [ -e "$before" ] || return 0
    while read -r path value; do
        echo "$value" > "$path" || refused=1
    done < "$before"
    rm -f "$before"
}}

refused=0
case "$1" in
    apply) apply "$2" "$3" ;;
    restore) restore ;;
esac
exit "$refused"
"""

ACS_SERVICE = f"""\
# {MARK}: traffic between GPUs and network adapters takes the shortest path, not through the processor.
[Unit]
Description=Switch off ACS redirection on the bridges above GPUs and network adapters
ConditionVirtualization=no
DefaultDependencies=no
After=sysinit.target
Before=basic.target docker.service nvidia-persistenced.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh {ACS_PROGRAM} off
ExecStop=/bin/sh {ACS_PROGRAM} restore
TimeoutStartSec=60
TimeoutStopSec=60

[Install]
WantedBy=multi-user.target
"""

# A bridge is a port above a GPU or a network adapter: its folder is a part of the device's path in sysfs.
ACS = f"""\
#!/bin/sh
# {MARK}: off: clear the ACS control register of each bridge above a GPU or network adapter; restore: as it was.
set -eu
before=/run/gpunode/acs-before

bridges() {{
    for device in /sys/bus/pci/devices/*; do
        read -r class < "$device/class"
        read -r vendor < "$device/vendor"
        case "$vendor:$class" in
            0x10de:0x03*|*:0x0200*|*:0x0207*) ;;
            *) continue ;;
        esac
        path=$(readlink -f "$device")
        while path=${{path%/*}}; case "${{path##*/}}" in ????:??:??.?) true ;; *) false ;; esac; do
            echo "${{path##*/}}"
        done
    done | sort -u
}}

off() {{
    for user in /sys/bus/pci/drivers/vfio-pci/????:??:??.?; do
        [ -e "$user" ] || continue
        echo "refused: ${{user##*/}} is bound to vfio-pci: without ACS a guest could reach other devices" >&2
        exit 1
    done
    mkdir -p /run/gpunode
    for bridge in $(bridges); do
        # A bridge without the capability has no such register.
        value=$(setpci -s "$bridge" ECAP_ACS+6.w 2>/dev/null) || continue
        [ -n "$value" ] && [ "$value" != 0000 ] || continue
        grep -q "^$bridge " "$before" 2>/dev/null || echo "$bridge $value" >> "$before"
        setpci -s "$bridge" ECAP_ACS+6.w=0000
        now=$(setpci -s "$bridge" ECAP_ACS+6.w)
        echo "$bridge: ACS control was $value, is $now"
        [ "$now" = 0000 ] || refused=1
    done
}}

restore() {{
    [ -e "$before" ] || return 0
    while read -r bridge value; do
        setpci -s "$bridge" "ECAP_ACS+6.w=$value" || refused=1
    done < "$before"
    rm -f "$before"
}}

refused=0
case "$1" in
    off) off ;;
    restore) restore ;;
esac
exit "$refused"
"""
