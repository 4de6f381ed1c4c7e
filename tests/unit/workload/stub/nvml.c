/* A small libnvidia-ml.so.1: signatures, structures and return codes as nvml.h documents them. */
#include "machine.h"

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15 };
typedef struct { char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } nvmlPciInfo_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
/* A handle is a GPU, or a MIG device of one. */
typedef struct handle { struct gpu *gpu; struct part *part; } *nvmlDevice_t;
static struct handle whole[MOST], divided[MOST * 8];
static int users;

int nvmlInit_v2(void) {
  read_machine();
  if (machine.nvml_init) return machine.nvml_init;
  users++;
  return SUCCESS;
}
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return users ? (users--, SUCCESS) : UNINITIALIZED; }
const char *nvmlErrorString(int code) {
  switch (code) {
    case SUCCESS: return "Success";
    case GPU_IS_LOST: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
  }
}
int nvmlSystemGetDriverVersion(char *to, unsigned size) {
  if (!users) return UNINITIALIZED;
  snprintf(to, size, "%s", machine.driver);
  return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = machine.cuda; return SUCCESS; }
/* All devices of the system, also one whose handle cannot be had. */
int nvmlDeviceGetCount_v2(unsigned *count) {
  if (!users) return UNINITIALIZED;
  *count = machine.gpus;
  return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
  if (!users) return UNINITIALIZED;
  if (index >= (unsigned)machine.gpus) return INVALID_ARGUMENT;
  if (!strcmp(machine.gpu[index].state, "lost")) return GPU_IS_LOST;
  whole[index].gpu = &machine.gpu[index];
  *device = &whole[index];
  return SUCCESS;
}
int nvmlDeviceGetName(nvmlDevice_t device, char *to, unsigned size) {
  if (device->part) snprintf(to, size, "%s MIG %s", device->gpu->name, device->part->profile);
  else snprintf(to, size, "%s", device->gpu->name);
  return SUCCESS;
}
int nvmlDeviceGetUUID(nvmlDevice_t device, char *to, unsigned size) {
  if (size < 41) return 7; /* NVML_ERROR_INSUFFICIENT_SIZE */
  write_uuid(device->part ? "MIG" : "GPU", device->part ? device->part->uuid : device->gpu->uuid, to);
  return SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
  if (device->part) return NOT_SUPPORTED;
  memset(pci, 0, sizeof *pci);
  pci->bus = device->gpu->bus;
  return SUCCESS;
}
int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
  *major = device->gpu->major;
  *minor = device->gpu->minor;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
  if (memory->version != (sizeof *memory | 2 << 24)) return 25; /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
  memory->total = (device->part ? device->part->mib : device->gpu->mib) << 20;
  memory->used = (device->part ? 9 : device->gpu->used) << 20;
  memory->reserved = 0;
  memory->free = memory->total - memory->used;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
  memory->total = (device->part ? device->part->mib : device->gpu->mib) << 20;
  memory->used = device->gpu->used << 20;
  memory->free = memory->total - memory->used;
  return SUCCESS;
}
int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *now, unsigned *later) {
  if (device->part) return INVALID_ARGUMENT;
  if (!strcmp(device->gpu->mig, "-")) return NOT_SUPPORTED;
  *now = *later = !strcmp(device->gpu->mig, "on");
  return SUCCESS;
}
/* How many there can be, not how many there are; zero where MIG is off. */
int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
  *count = !strcmp(device->gpu->mig, "on") ? 7 : 0;
  return SUCCESS;
}
int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *part) {
  for (int i = 0; i < machine.parts; i++)
    if (&machine.gpu[machine.part[i].gpu] == device->gpu && machine.part[i].index == (int)index) {
      divided[i].gpu = device->gpu;
      divided[i].part = &machine.part[i];
      *part = &divided[i];
      return SUCCESS;
    }
  return NOT_FOUND;
}
