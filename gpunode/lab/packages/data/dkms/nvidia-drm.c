#include "lab.h"

const char *nvidia_lab_release(void);

static bool modeset = true;
static bool fbdev = true;
module_param(modeset, bool, 0444);
module_param(fbdev, bool, 0444);

static int __init lab_init(void)
{
	pr_info("nvidia-drm: simulated by gpunode lab: %s\n", nvidia_lab_release());
	return 0;
}

static void __exit lab_exit(void)
{
}
module_init(lab_init);
module_exit(lab_exit);
