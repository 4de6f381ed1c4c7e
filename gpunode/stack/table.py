"""What the rules mean and where their facts are: the declarations, without a line of code about candidates."""

from gpunode.stack.rules import Rules

DECLARED = (
    (
        "R01-minor-floor",
        "The driver reaches the floor of the requested CUDA's major (11: 450.80.02, 12: 525.60.13, 13: 580.65.06), "
        "or a cuda-compat package fills the gap",
        "cuda_majors, toolkits",
    ),
    (
        "R02-native",
        "Below the driver of the CUDA itself only minor-version compatibility holds: a warning, for PTX of newer "
        "toolkits is not compiled there",
        "toolkits",
    ),
    (
        "R03-arch-last-branch",
        "No branch newer than the last one that drives the GPU (Kepler 470; Maxwell, Pascal, Volta 580)",
        "gpus, architectures",
    ),
    (
        "R04-arch-cuda",
        "No CUDA whose lowest compute capability is above the GPU's (CUDA 13: 7.5), and no cuDNN or NCCL built for it",
        "cuda_majors, architectures, cudnn, nccl",
    ),
    (
        "R05-arch-first-cuda",
        "The requested CUDA, and the driver's own, support the GPU's architecture (Blackwell from 12.8, Ada and Hopper "
        "from 11.8)",
        "architectures, branches",
    ),
    ("R06-open-required", "Blackwell and Grace Hopper run with the open kernel modules alone", "gpus, architectures"),
    (
        "R07-proprietary-required",
        "Maxwell, Pascal and Volta run with the proprietary kernel modules alone",
        "gpus, architectures",
    ),
    (
        "R08-no-proprietary",
        "The module's flavour is in the branch's packages (open from 515 on, proprietary up to 610; 615 is unsure)",
        "branches",
    ),
    (
        "R09-mixed-flavour",
        "A GPU that needs the open modules and one that needs the proprietary ones cannot share a node",
        "gpus, architectures",
    ),
    (
        "R10-gpu-min-driver",
        "The driver reaches the documented minimum of the GPU or board, and is a release that lists the GPU's id, "
        "whichever the flavour",
        "gpus, platforms",
    ),
    (
        "R11-fm-exact",
        "A node with NVSwitches gets a fabric manager and NSCQ of same version as the driver, from its source",
        "platforms, packages",
    ),
    (
        "R12-nvlink5",
        "HGX B200 and B300 get NVLSM, infiniband-diags and kernel modules beside the fabric manager; GB200 and GB300 "
        "get IMEX and no fabric manager",
        "platforms, packages",
    ),
    (
        "R13-branch-eol",
        "A branch past its end of life is a warning, or a refusal where that is requested and NVIDIA published the end",
        "branches",
    ),
    (
        "R14-compat-matrix",
        "A cuda-compat package only on branches that NVIDIA's table allows, before their end of life, and on "
        "data-centre GPUs",
        "forward_compat",
    ),
    (
        "R15-distro-repo",
        "The source has the branch for this system and CPU; package names and pinning are those of source, system "
        "and branch",
        "systems, packages, pinning",
    ),
    (
        "R16-repo-mix",
        "No second publisher beside the installed driver packages; an explicit switch of source removes the first. "
        "What the container toolkit superseded (nvidia-docker2) goes too",
        "origins.yml, container_toolkit",
    ),
    (
        "R17-dcgm",
        "DCGM's package is that of the driver's CUDA major; where a GPU is too old for it, the older one is there too",
        "dcgm",
    ),
    (
        "R18-ctk",
        "The container toolkit's four packages carry one version",
        "container_toolkit",
    ),
    (
        "R19-gdr",
        "GPUDirect RDMA over dma-buf needs the open modules, kernel 5.12, CUDA 11.7 and Turing or younger",
        "NVIDIA's GPUDirect RDMA documentation (in the code)",
    ),
    (
        "R20-framework",
        "A framework's wheel runs where the driver reaches the floor of its CUDA and the GPU is in its list of "
        "compute capabilities",
        "frameworks, wheels",
    ),
    (
        "R21-no-service",
        "A source without fabric manager, NVLSM or IMEX does not serve a board that needs them (Debian's archive); a "
        "stack without DCGM or container toolkit says so",
        "systems, platforms, dcgm, packages",
    ),
    ("R22-host-arch", "The GPU exists for this CPU architecture (GH200, GB200, GB300: aarch64)", "gpus, platforms"),
    (
        "R23-kernel-floor",
        "The kernel modules of either flavour build against this kernel: 4.15 or newer from branch 580 on, 3.10 from "
        "510 on",
        "branches",
    ),
    (
        "R24-toolkit-source",
        "The source has the toolkit requested on the host, in that version",
        "systems, packages",
    ),
    (
        "R25-driver-range",
        "The release is inside the requested range; of each branch the newest one inside is taken",
        "branches",
    ),
    (
        "R26-kernel-policy",
        "A requested kernel policy concerns modules that the distribution signed: what it holds or moves is a warning",
        "packages",
    ),
)

NEEDS = {
    "R01-minor-floor": (
        "toolkits.floor?",
        "cuda_majors.floor",
    ),
    "R02-native": ("toolkits.branch",),
    "R03-arch-last-branch": ("gpus.last_branch?",),
    "R04-arch-cuda": (
        "architectures.last_cuda?",
        "cuda_majors.min_compute_capability",
    ),
    "R05-arch-first-cuda": (
        "branches.native_cuda",
        "architectures.first_cuda",
    ),
    "R06-open-required": ("gpus.modules",),
    "R07-proprietary-required": ("gpus.modules",),
    "R08-no-proprietary": ("branches.modules",),
    "R10-gpu-min-driver": ("gpus.first_listed",),
    "R14-compat-matrix": ("forward_compat.works_on",),
    "R15-distro-repo": ("systems.first_branch",),
    "R22-host-arch": ("gpus.hosts",),
    "R23-kernel-floor": ("branches.kernel_floor",),
    "R24-toolkit-source": ("systems.first_toolkit",),
}
"""The bounds that a rule needs: where the catalog does not have one, or is not sure of it, acceptance is a warning.

R09 follows from R06 and R07; R11 and R12 warn of a board that is not sure themselves, R13 of an end of life that is not
known; R16 looks at the node alone. The others decide parts and accept nothing."""

rules = Rules()
"""All rules; the modules that import this fill in what they do."""

for _rule, _means, _facts in DECLARED:
    rules.add(_rule, _means, _facts, NEEDS.get(_rule, ()))
