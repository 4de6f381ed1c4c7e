#include "lab.h"

const char *nvidia_lab_release(void);

static int __init lab_init(void)
{
	pr_info("nvidia-modeset: simulated by gpunode lab: %s\n", nvidia_lab_release());
	return 0;
}

static void __exit lab_exit(void)
{
}
module_init(lab_init);
module_exit(lab_exit);
