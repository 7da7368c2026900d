/* A libnvidia-ml.so.1 for tests: two A100-like devices whose energy counter follows clock^3, and errors on demand.

   NVML_FAKE_<FUNCTION>=<code> makes a function answer with an error code, e.g. NVML_FAKE_TOTAL_ENERGY=3 (not
   supported), NVML_FAKE_SET_LIMIT=4 (no permission). The environment is read at each call. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int status;
enum { OK = 0, INVALID = 2, NO_SUPPORT = 3, SMALL = 7, DEVICES = 2 };
struct device { unsigned clock, limit; double energy_mj, at; };
struct util { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };

static struct device devices[DEVICES];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}
static status fault(const char *name) {
  char variable[64];
  snprintf(variable, sizeof variable, "NVML_FAKE_%s", name);
  const char *code = getenv(variable);
  return code ? atoi(code) : OK;
}
static double power_mw(struct device *d) {
  double share = d->clock / 1410.0, mw = 52000 + 348000 * share * share * share;
  return mw < d->limit ? mw : d->limit;
}
static void advance(struct device *d) {
  double t = now();
  d->energy_mj += power_mw(d) * (t - d->at);
  d->at = t;
}
static struct device *of(void *handle) { return handle; }

static void make_whole(void);
static int instance_of(void *h); /* of fake_nvml_mig.h: the number of a MIG device, -1 for a GPU */
static void name_slice(int number, char *uuid, unsigned length);
static unsigned long long slice_bytes(int number);

status nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  status failed = fault("INIT");
  if (failed) return failed;
  for (int i = 0; i < DEVICES; i++) devices[i] = (struct device){1410, 400000, 1e6 * (i + 1), now()};
  if (!getenv("NVML_FAKE_KEEP_CUT")) make_whole();
  return OK;
}
status nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(status s) { (void)s; return "a fake fault"; }
status nvmlDeviceGetCount_v2(unsigned *n) { *n = DEVICES; return OK; }
status nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) {
  if (i >= DEVICES) return INVALID;
  *handle = &devices[i];
  return OK;
}
status nvmlDeviceGetName(void *h, char *name, unsigned length) {
  (void)h;
  snprintf(name, length, "NVIDIA A100-SXM4-40GB");
  return OK;
}
status nvmlDeviceGetUUID(void *h, char *uuid, unsigned length) {
  if (instance_of(h) >= 0) { name_slice(instance_of(h), uuid, length); return OK; }
  snprintf(uuid, length, "GPU-00000000-0000-0000-0000-%012d", (int)(of(h) - devices));
  return OK;
}
status nvmlDeviceGetPowerUsage(void *h, unsigned *mw) {
  *mw = power_mw(of(h));
  return fault("POWER");
}
status nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) {
  advance(of(h));
  *mj = of(h)->energy_mj;
  return fault("TOTAL_ENERGY");
}
status nvmlDeviceGetUtilizationRates(void *h, struct util *u) {
  (void)h;
  *u = (struct util){75, 30};
  return fault("UTILIZATION");
}
status nvmlDeviceGetMemoryInfo(void *h, struct memory *m) {
  unsigned long long total = instance_of(h) < 0 ? 40ULL << 30 : slice_bytes(instance_of(h));
  *m = (struct memory){total, total / 4, total - total / 4};
  return OK;
}
status nvmlDeviceGetClockInfo(void *h, unsigned type, unsigned *mhz) {
  if (type != 1) return INVALID;
  *mhz = of(h)->clock;
  return OK;
}
status nvmlDeviceGetSupportedMemoryClocks(void *h, unsigned *count, unsigned *mhz) {
  (void)h;
  if (fault("CLOCKS")) return fault("CLOCKS");
  if (*count < 1) { *count = 1; return SMALL; }
  *count = 1;
  mhz[0] = 1215;
  return OK;
}
status nvmlDeviceGetSupportedGraphicsClocks(void *h, unsigned memory_mhz, unsigned *count, unsigned *mhz) {
  (void)h;
  if (memory_mhz != 1215) return INVALID;
  if (*count < 81) { *count = 81; return SMALL; }
  *count = 81;
  for (int i = 0; i < 81; i++) mhz[i] = 1410 - 15 * i;
  return OK;
}
status nvmlDeviceGetPowerManagementLimit(void *h, unsigned *mw) { *mw = of(h)->limit; return fault("LIMIT"); }
status nvmlDeviceGetPowerManagementDefaultLimit(void *h, unsigned *mw) { (void)h; *mw = 400000; return OK; }
status nvmlDeviceSetPowerManagementLimit(void *h, unsigned mw) {
  if (fault("SET_LIMIT")) return fault("SET_LIMIT");
  if (mw < 100000 || mw > 400000) return INVALID;
  advance(of(h));
  of(h)->limit = mw;
  return OK;
}
status nvmlDeviceSetGpuLockedClocks(void *h, unsigned low, unsigned high) {
  if (fault("SET_CLOCK")) return fault("SET_CLOCK");
  (void)low;
  advance(of(h));
  of(h)->clock = high;
  return OK;
}
status nvmlDeviceResetGpuLockedClocks(void *h) {
  if (fault("SET_CLOCK")) return fault("SET_CLOCK");
  advance(of(h));
  of(h)->clock = 1410;
  return OK;
}
#include "fake_nvml_mig.h"
