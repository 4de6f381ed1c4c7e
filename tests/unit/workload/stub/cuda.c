/* A small libcuda.so.1: signatures and return codes as cuda.h documents them; kernels are computed by the processor.
 *
 * Which devices a process gets: one MIG device at most; no whole GPU where a MIG device is enumerated; with
 * CUDA_VISIBLE_DEVICES those that are named, up to the first name that is none.
 */
#include "machine.h"

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_PTX = 218, NOT_FOUND = 500 };
typedef int CUdevice;
typedef struct { struct gpu *gpu; struct part *part; } device;
static device found[MOST];
static int count, started, current = -1;
static struct { char entry[64]; int factor, addend; } module;

static int usable(struct gpu *gpu) { return !strcmp(gpu->state, "ok") || !strcmp(gpu->state, "wrong"); }
static int is_divided(struct gpu *gpu) { return !strcmp(gpu->mig, "on"); }
static void add(struct gpu *gpu, struct part *part) { found[count].gpu = gpu; found[count++].part = part; }

static void choose(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  char text[4096], uuid[48], *save = 0;
  if (!visible) {
    for (int i = 0; i < machine.parts && !count; i++)
      if (usable(&machine.gpu[machine.part[i].gpu])) add(&machine.gpu[machine.part[i].gpu], &machine.part[i]);
    for (int i = 0; i < machine.gpus && !machine.parts; i++)
      if (usable(&machine.gpu[i]) && !is_divided(&machine.gpu[i])) add(&machine.gpu[i], 0);
    return;
  }
  snprintf(text, sizeof text, "%s", visible);
  for (char *name = strtok_r(text, ",", &save); name; name = strtok_r(0, ",", &save)) {
    int before = count;
    for (int i = 0; i < machine.parts && !count; i++) {
      write_uuid("MIG", machine.part[i].uuid, uuid);
      if (!strcmp(uuid, name)) add(&machine.gpu[machine.part[i].gpu], &machine.part[i]);
    }
    for (int i = 0, index = 0; i < machine.gpus; i++) {
      if (!usable(&machine.gpu[i]) || is_divided(&machine.gpu[i])) continue;
      write_uuid("GPU", machine.gpu[i].uuid, uuid);
      char *end;
      long number = strtol(name, &end, 10);
      if ((!strncmp(name, "GPU-", 4) && !strncmp(uuid, name, strlen(name))) || (!*end && *name && number == index))
        add(&machine.gpu[i], 0);
      index++;
    }
    if (count == before) return;
  }
}

int cuInit(unsigned flags) {
  if (flags) return INVALID_VALUE;
  read_machine();
  if (machine.cu_init == 11) abort();
  if (machine.cu_init) return machine.cu_init;
  count = 0;
  choose();
  if (!count) return NO_DEVICE;
  started = 1;
  return SUCCESS;
}
int cuDriverGetVersion(int *version) { read_machine(); *version = machine.cuda; return SUCCESS; }
int cuGetErrorName(int code, const char **name) {
  switch (code) {
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    case 802: *name = "CUDA_ERROR_SYSTEM_NOT_READY"; break;
    case 803: *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; break;
    case 804: *name = "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"; break;
    case 999: *name = "CUDA_ERROR_UNKNOWN"; break;
    default: *name = 0; return INVALID_VALUE;
  }
  return SUCCESS;
}
int cuDeviceGetCount(int *number) { *number = count; return started ? SUCCESS : NOT_INITIALIZED; }
int cuDeviceGet(CUdevice *to, int ordinal) {
  if (ordinal < 0 || ordinal >= count) return INVALID_DEVICE;
  *to = ordinal;
  return SUCCESS;
}
int cuDeviceGetName(char *to, int size, CUdevice d) {
  if (found[d].part) snprintf(to, size, "%s MIG %s", found[d].gpu->name, found[d].part->profile);
  else snprintf(to, size, "%s", found[d].gpu->name);
  return SUCCESS;
}
int cuDeviceTotalMem_v2(size_t *size, CUdevice d) {
  *size = (found[d].part ? found[d].part->mib : found[d].gpu->mib) << 20;
  return SUCCESS;
}
int cuDeviceGetAttribute(int *value, int attribute, CUdevice d) {
  switch (attribute) {
    case 33: *value = found[d].gpu->bus; break;
    case 34: case 50: *value = 0; break;
    case 75: *value = found[d].gpu->major; break;
    case 76: *value = found[d].gpu->minor; break;
    default: return INVALID_VALUE;
  }
  return SUCCESS;
}
static int write_bytes(unsigned char *to, const char *hex) {
  for (int i = 0; i < 16; i++) sscanf(hex + 2 * i, "%2hhx", &to[i]);
  return SUCCESS;
}
/* The first version gives the GPU's, the second that of the MIG device. */
int cuDeviceGetUuid(unsigned char *to, CUdevice d) { return write_bytes(to, found[d].gpu->uuid); }
int cuDeviceGetUuid_v2(unsigned char *to, CUdevice d) {
  return write_bytes(to, found[d].part ? found[d].part->uuid : found[d].gpu->uuid);
}
int cuDevicePrimaryCtxRetain(void **context, CUdevice d) { *context = &found[d]; return SUCCESS; }
int cuCtxSetCurrent(void *context) { current = (device *)context - found; return SUCCESS; }
/* Takes what the text says of its entry, its target and its arithmetic; the real one compiles it. */
int cuModuleLoadDataEx(void **to, const char *text, unsigned options, int *names, void **values) {
  int target = 0;
  char *at = strstr(text, ".target sm_"), *sum = strstr(text, "mad.lo.s32 %value, %value,");
  if (current < 0) return INVALID_CONTEXT;
  if (at) target = atoi(at + 11);
  if (!at || !strstr(text, ".version ") || target > found[current].gpu->major * 10 + found[current].gpu->minor) {
    for (unsigned i = 0; i < options; i++)
      if (names[i] == 5) strcpy(values[i], "ptxas fatal : SM version specified by .target is higher than that of the GPU");
    return INVALID_PTX;
  }
  at = strstr(text, ".entry ");
  if (!at || sscanf(at, ".entry %63[a-z]", module.entry) != 1) return INVALID_PTX;
  if (!sum || sscanf(sum, "mad.lo.s32 %%value, %%value, %d, %d;", &module.factor, &module.addend) != 2) return INVALID_PTX;
  *to = &module;
  return SUCCESS;
}
int cuModuleGetFunction(void **to, void *from, const char *name) {
  (void)from;
  if (strcmp(name, module.entry)) return NOT_FOUND;
  *to = &module;
  return SUCCESS;
}
int cuMemAlloc_v2(unsigned long long *to, size_t size) { *to = (unsigned long long)calloc(1, size); return SUCCESS; }
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t size) { memcpy((void *)to, from, size); return SUCCESS; }
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size) { memcpy(to, (void *)from, size); return SUCCESS; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
  unsigned *from = *(unsigned **)parameters[0], *to = *(unsigned **)parameters[1], limit = *(unsigned *)parameters[2];
  (void)shared, (void)stream;
  if (f != &module || gy * gz * by * bz != 1 || bx > 1024 || extra) return INVALID_VALUE;
  for (unsigned i = 0; i < gx * bx && i < limit; i++) to[i] = from[i] * module.factor + module.addend;
  if (!strcmp(found[current].gpu->state, "wrong")) to[7] ^= 1;
  return SUCCESS;
}
int cuCtxSynchronize(void) { return SUCCESS; }
