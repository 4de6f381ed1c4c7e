#include "lab.h"

const char *nvidia_lab_release(void);
const char *nvidia_lab_release(void)
{
	return LAB_RELEASE;
}
EXPORT_SYMBOL(nvidia_lab_release);

static int NVreg_OpenRmEnableUnsupportedGpus = 1;
static int NVreg_RestrictProfilingToAdminUsers = 1;
static int NVreg_PreserveVideoMemoryAllocations;
static int NVreg_CreateImexChannel0;
static int NVreg_EnableGpuFirmware = 18;
static char *NVreg_RegistryDwords;
module_param(NVreg_OpenRmEnableUnsupportedGpus, int, 0444);
module_param(NVreg_RestrictProfilingToAdminUsers, int, 0444);
module_param(NVreg_PreserveVideoMemoryAllocations, int, 0444);
module_param(NVreg_CreateImexChannel0, int, 0444);
module_param(NVreg_EnableGpuFirmware, int, 0444);
module_param(NVreg_RegistryDwords, charp, 0444);
MODULE_ALIAS("char-major-195-*");
MODULE_ALIAS("pci:v000010DEd*sv*sd*bc03sc00i00*");
MODULE_ALIAS("pci:v000010DEd*sv*sd*bc03sc02i00*");
MODULE_ALIAS("pci:v000010DEd*sv*sd*bc06sc80i00*");
MODULE_FIRMWARE("nvidia/" LAB_RELEASE "/gsp_tu10x.bin");
MODULE_FIRMWARE("nvidia/" LAB_RELEASE "/gsp_ga10x.bin");

static int __init lab_init(void)
{
	pr_info("NVRM: simulated by gpunode lab: %s\n", nvidia_lab_release());
	return 0;
}

static void __exit lab_exit(void)
{
}
module_init(lab_init);
module_exit(lab_exit);
