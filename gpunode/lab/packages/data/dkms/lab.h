/* Simulated driver of gpunode's lab: it builds, it says its version, it drives nothing. */
#include <linux/module.h>
#define LAB_RELEASE "{release}"
MODULE_VERSION(LAB_RELEASE);
MODULE_LICENSE("{license}");
MODULE_DESCRIPTION("simulated by gpunode lab");
