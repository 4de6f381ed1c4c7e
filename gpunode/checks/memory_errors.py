"""Checks on errors in the memory of GPUs: ECC counters, remapped rows, retired pages."""

from gpunode.checks.compare import Scale, at_most, failed, first_fault, passed, skipped, warned
from gpunode.checks.gpus import SeenGpu, gpu_check
from gpunode.checks.registry import CheckResult, Status
from gpunode.checks.thresholds import Threshold
from gpunode.facts.models.smi import RemappedRows
from gpunode.text import counted

UNCORRECTED_MOST = Threshold(
    "gpu.ecc-uncorrected.most",
    0,
    "errors",
    "More uncorrectable errors since the driver was loaded are a failure.",
    source="our choice: each one lost data",
)
LIFETIME_MOST = Threshold(
    "gpu.ecc-uncorrected.lifetime-most",
    0,
    "errors",
    "More uncorrectable errors in the card's life warn.",
    source="our choice",
)
AZNHC = "AzNHC, azure_gpu_ecc.nhc"
SRAM_LIFETIME_MOST = Threshold(
    "gpu.ecc-uncorrected.sram-lifetime-most",
    0,
    "errors",
    "More uncorrectable errors of on-chip memory in the card's life are a failure, unless the driver reports whether "
    "they passed its own threshold.",
    source=AZNHC,
)
CORRECTED_MOST = Threshold(
    "gpu.ecc-corrected.most",
    20_000_000,
    "errors",
    "More corrected errors of DRAM warn, since the driver was loaded or in the card's life.",
    source=AZNHC,
)
SRAM_CORRECTED_MOST = Threshold(
    "gpu.ecc-corrected.sram-most",
    10_000,
    "errors",
    "More corrected errors of on-chip memory warn, since the driver was loaded or in the card's life.",
    source=AZNHC,
)
REMAPPED_SOURCE = "AzNHC azure_gpu_ecc.nhc, OCI check_gpu_setup.py, sichek's specifications"
REMAPPED_MOST = Threshold(
    "gpu.remapped-rows.most",
    512,
    "rows",
    "More rows that were remapped after uncorrectable errors are a failure.",
    source=REMAPPED_SOURCE,
)
GCM = "GCM check_nvidia_smi.py: 10 retired pages of either kind"
RETIRED_MOST = Threshold(
    "gpu.retired-pages.most",
    61,
    "pages",
    "More retired pages are a failure: the table is full, and no page can be retired any more.",
    source="AzNHC, azure_gpu_ecc.nhc: 62 pages fill the table",
)
DOUBLE_BIT_MOST = Threshold(
    "gpu.retired-pages.double-bit-most",
    10,
    "pages",
    "More pages retired after a double-bit error are a failure; one warns, because it lost data.",
    source=GCM,
)
SINGLE_BIT_MOST = Threshold(
    "gpu.retired-pages.single-bit-most", 10, "pages", "More pages retired after single-bit errors warn.", source=GCM
)
PENDING = "Run nvidia-smi -i GPU -e 1 to enable ECC; a reset of the idle GPU or a reboot applies the change."
SINCE_LOADED = "since the driver was loaded"
RESET = "Drain the node and reset the idle GPU (nvidia-smi --gpu-reset -i GPU), or reboot."


@gpu_check(
    "gpu.ecc-mode",
    means="ECC is enabled where the GPU supports it, and no change is pending until a reset: without it, "
    "memory errors silently corrupt results.",
    remedy="nvidia-smi -i GPU -e 1 and a reset of the idle GPU switch it on.",
    state="observe",
    actions=("fix_configuration", "reset_gpu"),
    category="memory",
)
def ecc_mode(gpu: SeenGpu) -> CheckResult:
    enabled, pending = gpu.reported.ecc.enabled, gpu.reported.ecc.pending
    if enabled is None:
        return gpu.not_reported("its ECC mode", expected=gpu.for_servers)
    if pending is not None and pending != enabled:
        now, after = ("on", "off") if enabled else ("off", "on")
        message = f"ECC is {now}, and {after} after the next reset"
        return warned(message, expected=True, measured=enabled, remedy=PENDING)
    if enabled:
        return passed("ECC is on", expected=True, measured=True)
    if gpu.for_servers:
        return warned("ECC is off", expected=True, measured=False)
    return skipped(f"ECC is off, as it mostly is on a {gpu.name}")


@gpu_check(
    "gpu.ecc-uncorrected",
    means="Memory has had no uncorrectable error since the driver was loaded (volatile), and none in the card's life "
    "(aggregate). Older ones of DRAM were dealt with by remapping or retirement, and are worth watching; on-chip "
    "memory (SRAM) has no spare parts.",
    remedy=f"{RESET} If errors recur, run DCGM's diagnostics (dcgmi diag -r 3) and return the GPU.",
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
    category="memory",
    thresholds=(UNCORRECTED_MOST, LIFETIME_MOST, SRAM_LIFETIME_MOST),
)
def ecc_uncorrected(gpu: SeenGpu) -> CheckResult:
    ecc = gpu.reported.ecc
    now, ever = ecc.volatile_uncorrected, ecc.aggregate_uncorrected
    if now is None and ever is None:
        return gpu.not_reported("its ECC counters", expected=ecc.enabled is True)
    if ecc.sram_threshold_exceeded:
        return failed(
            f"uncorrectable errors in SRAM passed the driver's threshold ({ever} in the card's life)",
            expected=0,
            measured=ever,
            unit="errors",
            remedy="Return the card: its on-chip memory cannot be repaired.",
        )
    words = f"{counted(now or 0, 'uncorrectable error')} since the driver was loaded, {ever or 0} in the card's life"
    most, most_ever = UNCORRECTED_MOST.of(gpu.match), LIFETIME_MOST.of(gpu.match)
    # Where the driver reports a threshold of its own, that one decides on SRAM.
    sram = ecc.aggregate_sram_uncorrected if ecc.sram_threshold_exceeded is None else 0
    most_sram = SRAM_LIFETIME_MOST.of(gpu.match)
    in_sram = at_most(sram or 0, most_sram, words, f"{words}, {sram} of them in SRAM", unit="errors", source=AZNHC)
    if in_sram.status is Status.FAIL:
        return in_sram
    if now is None:
        return gpu.not_reported("its volatile ECC counters", expected=True)
    return first_fault(
        at_most(now, most, words, expected=0, unit="errors"),
        at_most(ever or 0, most_ever, words, fault=Status.WARN, expected=0, unit="errors"),
        passed(words if now or ever else "no uncorrectable error", expected=0, measured=now, unit="errors"),
    )


@gpu_check(
    "gpu.ecc-corrected",
    means="Corrected errors are not so many that an uncorrectable one is to be expected: of DRAM and of on-chip memory "
    "(SRAM), since the driver was loaded and in the card's life.",
    remedy="Watch the counters (nvidia-smi -q -d ECC); run DCGM's diagnosis when the GPU is idle.",
    state="observe",
    actions=("open_support_case",),
    category="memory",
    thresholds=(CORRECTED_MOST, SRAM_CORRECTED_MOST),
)
def ecc_corrected(gpu: SeenGpu) -> CheckResult:
    ecc = gpu.reported.ecc
    now = ecc.volatile_corrected
    if now is None:
        return gpu.not_reported("its ECC counters", expected=ecc.enabled is True)
    verdicts = []
    for period, total, sram in (
        (SINCE_LOADED, now, ecc.volatile_sram_corrected or 0),
        ("in the card's life", ecc.aggregate_corrected or 0, ecc.aggregate_sram_corrected or 0),
    ):
        for limit, number, of in ((SRAM_CORRECTED_MOST, sram, " of SRAM"), (CORRECTED_MOST, total - sram, "")):
            message = f"{counted(number, f'corrected error{of}', f'corrected errors{of}')} {period}"
            most = limit.of(gpu.match)
            verdicts.append(at_most(number, most, message, fault=Status.WARN, unit="errors", source=AZNHC))
    good = passed(f"{counted(now, 'corrected error')} {SINCE_LOADED}", measured=now, unit="errors", source=AZNHC)
    return first_fault(*verdicts, good)


@gpu_check(
    "gpu.remapped-rows",
    means="No row of memory waits to be remapped, remapping has not failed, and few spare rows are used (cards from "
    "Ampere on).",
    remedy=f"{RESET} A failure, or very many rows: return the card.",
    state="drain",
    actions=("reset_gpu", "replace_hardware"),
    category="memory",
    architectures=("ampere", "ada", "hopper", "blackwell", "rubin"),
    thresholds=(REMAPPED_MOST,),
)
def remapped_rows(gpu: SeenGpu) -> CheckResult:
    rows = gpu.reported.remapped_rows
    if rows == RemappedRows():
        capability = gpu.known.get("compute_capability")
        from_ampere_on = capability is not None and float(capability) >= 8.0
        return gpu.not_reported("its remapped rows", expected=gpu.for_servers and from_ampere_on)
    uncorrected, corrected = rows.uncorrectable or 0, rows.correctable or 0
    most = REMAPPED_MOST.of(gpu.match)
    if rows.failure:
        return failed(
            "remapping a row failed",
            expected=0,
            measured=1,
            unit="failures",
            source=REMAPPED_SOURCE,
            remedy="Return the card.",
        )
    if rows.pending:
        message = f"a row waits to be remapped ({uncorrected} uncorrectable, {corrected} correctable so far)"
        return failed(message, expected=0, measured=1, unit="rows pending", source=REMAPPED_SOURCE)
    if uncorrected > most:
        message = f"{uncorrected} rows were remapped after uncorrectable errors"
        return failed(message, expected=most, measured=uncorrected, unit="rows", source=REMAPPED_SOURCE)
    if None in (rows.failure, rows.pending):
        return gpu.not_reported("whether rows wait to be remapped", expected=True)
    message = f"{counted(uncorrected + corrected, 'row')} remapped, none waits"
    return passed(message, measured=uncorrected + corrected, unit="rows", source=REMAPPED_SOURCE)


@gpu_check(
    "gpu.retired-pages",
    means="No page of memory waits to be retired, and few are (cards up to Turing): for double-bit errors, which lost "
    "data, and for repeated single-bit errors.",
    remedy=f"{RESET} Many pages, or ever more of them: return the card.",
    state="drain",
    actions=("reset_gpu", "replace_hardware"),
    category="memory",
    architectures=("kepler", "maxwell", "pascal", "volta", "turing"),
    thresholds=(RETIRED_MOST, DOUBLE_BIT_MOST, SINGLE_BIT_MOST),
)
def retired_pages(gpu: SeenGpu) -> CheckResult:
    pages = gpu.reported.retired_pages
    single, double, pending = pages.single_bit, pages.double_bit, pages.pending
    if single is None and double is None and pending is None:
        capability = gpu.known.get("compute_capability")
        until_turing = capability is not None and float(capability) < 8.0
        return gpu.not_reported("its retired pages", expected=gpu.for_servers and until_turing)
    number = (single or 0) + (double or 0)
    pages_of: Scale = {"unit": "pages", "source": GCM}
    if pending:
        return failed(f"pages wait to be retired ({number} are)", expected=0, measured=number, **pages_of)
    words = f"{counted(number, 'page')} retired, {double or 0} of them for double-bit errors"
    most, most_double, most_single = (limit.of(gpu.match) for limit in (RETIRED_MOST, DOUBLE_BIT_MOST, SINGLE_BIT_MOST))
    full = at_most(number, most, words, unit="pages", source=RETIRED_MOST.source)
    many = at_most(double or 0, most_double, words, **pages_of)
    if pending is None and full.status is many.status is Status.PASS:
        return gpu.not_reported("whether pages wait to be retired", expected=True)
    return first_fault(
        full,
        many,
        at_most(double or 0, 0, words, fault=Status.WARN, **pages_of),
        at_most(single or 0, most_single, words, fault=Status.WARN, **pages_of),
        passed(f"{counted(number, 'page')} retired, none waits", expected=most, measured=number, **pages_of),
    )
