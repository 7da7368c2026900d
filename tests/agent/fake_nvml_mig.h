/* MIG for fake_nvml.c: instances of each GPU, at the places and with the errors of an A100.

   NVML_FAKE_ACTIVATION=<code> makes the switch of MIG mode wait, with that code as its status. NVML_FAKE_CREATE_AT=<slot>
   limits NVML_FAKE_CREATE_GI to instances that begin at that slot. */
enum { IN_USE = 19, NOT_FOUND = 6, RESOURCES = 23, MOST = 7, PROFILES = 5 };
struct place { unsigned start, size; };
struct profile { unsigned slices, width, count, memory_mb; const char *name; unsigned starts[7]; };
struct instance { int used, profile, compute; unsigned start; };
struct gpu_info { unsigned version, id, p2p, slices, count, rest[6]; unsigned long long memory_mb; char name[96]; };
struct compute_info { unsigned version, id, slices, count, rest[6]; char name[96]; };
struct instance_info { void *device; unsigned id, profile; struct place place; };
struct metric { unsigned id; status result; double value; char *texts[3]; };
struct metrics { unsigned version, count; double *first, *second; struct metric metrics[477]; };

static const struct profile profiles[PROFILES] = {
    {1, 1, 7, 4864, "MIG 1g.5gb", {0, 1, 2, 3, 4, 5, 6}}, {2, 2, 3, 9984, "MIG 2g.10gb", {0, 2, 4}},
    {3, 4, 2, 20096, "MIG 3g.20gb", {0, 4}},              {4, 4, 1, 20096, "MIG 4g.20gb", {0}},
    {7, 8, 1, 40192, "MIG 7g.40gb", {0}},
};
static struct instance instances[DEVICES * MOST];
static unsigned modes[DEVICES];

static void make_whole(void) {
  memset(instances, 0, sizeof instances);
  memset(modes, 0, sizeof modes);
}
static int instance_of(void *h) {
  struct instance *found = h;
  return found >= instances && found < instances + DEVICES * MOST ? (int)(found - instances) : -1;
}
static void name_slice(int number, char *uuid, unsigned length) {
  struct instance *i = &instances[number];
  snprintf(uuid, length, "MIG-%d-%u-%u", number / MOST, profiles[i->profile].slices, i->start);
}
static unsigned long long slice_bytes(int number) {
  return (unsigned long long)profiles[instances[number].profile].memory_mb << 20;
}
static unsigned slots(struct instance *i) { return ((1u << profiles[i->profile].width) - 1) << i->start; }

status nvmlDeviceGetMigMode(void *h, unsigned *now_, unsigned *later) {
  *now_ = *later = modes[of(h) - devices];
  return fault("MIG");
}
status nvmlDeviceSetMigMode(void *h, unsigned mode, status *activation) {
  if (fault("SET_MIG")) return fault("SET_MIG");
  *activation = fault("ACTIVATION");
  if (*activation) return OK;
  for (int i = 0; i < MOST; i++)
    if (instances[MOST * (of(h) - devices) + i].used) return IN_USE;
  modes[of(h) - devices] = mode;
  return OK;
}
status nvmlDeviceGetGpuInstanceProfileInfoV(void *h, unsigned number, struct gpu_info *info) {
  (void)h;
  if (fault("MIG")) return fault("MIG");
  if (number >= PROFILES) return NO_SUPPORT;
  const struct profile *p = &profiles[number];
  info->id = 100 + number;
  info->slices = p->slices;
  info->count = p->count;
  info->memory_mb = p->memory_mb;
  snprintf(info->name, sizeof info->name, "%s", p->name);
  return OK;
}
status nvmlDeviceGetGpuInstancePossiblePlacements_v2(void *h, unsigned id, struct place *found, unsigned *count) {
  (void)h;
  const struct profile *p = &profiles[id - 100];
  if (*count < p->count) return SMALL;
  *count = p->count;
  for (unsigned i = 0; i < p->count; i++) found[i] = (struct place){p->starts[i], p->width};
  return OK;
}
status nvmlDeviceCreateGpuInstanceWithPlacement(void *h, unsigned id, struct place *place, void **made) {
  const char *at = getenv("NVML_FAKE_CREATE_AT");
  if (fault("CREATE_GI") && (!at || (unsigned)atoi(at) == place->start)) return fault("CREATE_GI");
  struct instance *own = &instances[MOST * (of(h) - devices)];
  struct instance wanted = {1, id - 100, 0, place->start}, *empty = NULL;
  for (int i = 0; i < MOST; i++) {
    if (own[i].used && (slots(&own[i]) & slots(&wanted))) return RESOURCES;
    if (!own[i].used && !empty) empty = &own[i];
  }
  if (!modes[of(h) - devices] || !empty || place->size != profiles[id - 100].width) return INVALID;
  *empty = wanted;
  *made = empty;
  return OK;
}
status nvmlDeviceGetGpuInstances(void *h, unsigned id, void **found, unsigned *count) {
  unsigned n = 0;
  for (int i = 0; i < MOST; i++) {
    struct instance *each = &instances[MOST * (of(h) - devices) + i];
    if (each->used && each->profile == (int)id - 100) found[n++] = each;
  }
  *count = n;
  return OK;
}
status nvmlDeviceGetGpuInstanceById(void *h, unsigned id, void **found) {
  *found = &instances[MOST * (of(h) - devices) + id];
  return fault("INSTANCES");
}
status nvmlGpuInstanceGetInfo(struct instance *i, struct instance_info *info) {
  int number = instance_of(i);
  *info = (struct instance_info){&devices[number / MOST], number % MOST, 100 + i->profile, {i->start, 0}};
  return OK;
}
status nvmlGpuInstanceDestroy(struct instance *i) {
  if (fault("DESTROY_GI")) return fault("DESTROY_GI");
  if (i->compute) return IN_USE;
  i->used = 0;
  return OK;
}
status nvmlGpuInstanceGetComputeInstanceProfileInfoV(void *i, unsigned number, unsigned shared, struct compute_info *c) {
  if (shared || number != (unsigned)((struct instance *)i)->profile) return NO_SUPPORT;
  c->id = 200 + number;
  return OK;
}
status nvmlGpuInstanceCreateComputeInstance(struct instance *i, unsigned id, void **made) {
  if (fault("CREATE_CI")) return fault("CREATE_CI");
  if ((int)id - 200 != i->profile) return INVALID;
  i->compute = 1 + fault("COMPUTE_PARTS");
  *made = i;
  return OK;
}
status nvmlGpuInstanceGetComputeInstances(struct instance *i, unsigned id, void **found, unsigned *count) {
  *count = i->compute && (int)id - 200 == i->profile;
  found[0] = i;
  return OK;
}
status nvmlComputeInstanceDestroy(struct instance *i) {
  if (fault("DESTROY_CI")) return fault("DESTROY_CI");
  i->compute = 0;
  return OK;
}
status nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *count) {
  (void)h;
  *count = 2 * MOST;
  return OK;
}
status nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned number, void **found) {
  struct instance *each = &instances[MOST * (of(h) - devices) + number % MOST];
  if (!each->used || each->compute <= (int)(number / MOST)) return NOT_FOUND;
  *found = each;
  return OK;
}
status nvmlDeviceGetGpuInstanceId(void *h, unsigned *id) {
  *id = instance_of(h) % MOST;
  return OK;
}
status nvmlGpmQueryDeviceSupport(void *h, unsigned *support) {
  (void)h;
  support[1] = 1;
  return fault("GPM");
}
status nvmlGpmSampleAlloc(double **sample) { *sample = malloc(sizeof **sample); return OK; }
status nvmlGpmSampleFree(double *sample) { free(sample); return OK; }
status nvmlGpmMigSampleGet(void *h, unsigned id, double *sample) {
  (void)h;
  *sample = id;
  return fault("GPM_SAMPLE");
}
status nvmlGpmMetricsGet(struct metrics *wanted) {
  if (wanted->count != 1 || wanted->metrics[0].id != 2 || *wanted->first != *wanted->second) return INVALID;
  wanted->metrics[0].value = 10 * (*wanted->second + 1); /* the first instance is 10 % busy, the second 20 % */
  wanted->metrics[0].result = OK;
  return OK;
}
