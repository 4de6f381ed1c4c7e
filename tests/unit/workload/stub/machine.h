/* The machine that both stub libraries describe: lines of the file that GPUNODE_STUB names, fields apart by "|".
 *
 *   driver|580.95.05|13000                    the module's version; the CUDA of libcuda (1000 * major + 10 * minor)
 *   nvml_init|18                              what nvmlInit returns; 0 where the line is not there
 *   cu_init|804                               what cuInit returns
 *   gpu|UUID|BUS|NAME|MAJOR.MINOR|MIB|USED|MIG|STATE
 *   mig|GPU|INDEX|UUID|PROFILE|MIB
 *
 * UUIDs are 32 hexadecimal digits. MIG: "-" the GPU cannot be divided, "off", "on". STATE: "ok"; "lost" NVML cannot
 * reach it and CUDA does not count it; "nvml" CUDA alone does not count it; "wrong" it computes wrongly.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 64

struct part { int gpu, index; char uuid[33], profile[32]; unsigned long long mib; };
struct gpu {
  char uuid[33], name[96], mig[8], state[8];
  unsigned bus; int major, minor; unsigned long long mib, used;
};
static struct {
  char driver[32]; int cuda, nvml_init, cu_init, gpus, parts;
  struct gpu gpu[MOST]; struct part part[MOST * 8];
} machine;

static void read_machine(void) {
  const char *path = getenv("GPUNODE_STUB");
  FILE *file = path ? fopen(path, "r") : 0;
  char line[512];
  memset(&machine, 0, sizeof machine);
  if (!file) return;
  while (fgets(line, sizeof line, file)) {
    struct gpu *g = &machine.gpu[machine.gpus];
    struct part *p = &machine.part[machine.parts];
    if (sscanf(line, "driver|%31[^|]|%d", machine.driver, &machine.cuda) == 2) continue;
    if (sscanf(line, "nvml_init|%d", &machine.nvml_init) == 1) continue;
    if (sscanf(line, "cu_init|%d", &machine.cu_init) == 1) continue;
    if (sscanf(line, "gpu|%32[^|]|%x|%95[^|]|%d.%d|%llu|%llu|%7[^|]|%7[^|\n]", g->uuid, &g->bus, g->name, &g->major,
               &g->minor, &g->mib, &g->used, g->mig, g->state) == 9) {
      if (machine.gpus < MOST - 1) machine.gpus++;
    } else if (sscanf(line, "mig|%d|%d|%32[^|]|%31[^|]|%llu", &p->gpu, &p->index, p->uuid, p->profile, &p->mib) == 5) {
      if (machine.parts < MOST * 8 - 1) machine.parts++;
    }
  }
  fclose(file);
}

/* "GPU-" or "MIG-" and the number in groups of 8, 4, 4, 4 and 12 digits. */
static void write_uuid(const char *kind, const char *hex, char *to) {
  sprintf(to, "%s-%.8s-%.4s-%.4s-%.4s-%.12s", kind, hex, hex + 8, hex + 12, hex + 16, hex + 20);
}
