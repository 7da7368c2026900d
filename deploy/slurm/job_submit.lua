-- Give new GPU jobs a begin time a little ahead, so that Wattshift's bridge has time to plan them. The begin time passes
-- by itself after HOLD_S, and is marked as ours in the admin comment, so that the bridge never takes a user's begin time
-- for it. Slurm reads this file, beside slurm.conf, with JobSubmitPlugins=lua. It asks nobody: submitting never waits.
--
-- Only what the bridge can steer is delayed: batch jobs and arrays in the partitions named here, and only while a bridge
-- in control mode says that it is heard. Interactive jobs, heterogeneous jobs, jobs of MIG slices, and jobs with a
-- dependency, a reservation, a hold or a begin time are left alone, and so are those that opted out.

local HOLD_S = 30
local PARTITIONS = {} -- those that the bridge steers, such as { batch = true }; nil: all
local LEAVE_QOS = {} -- those that the bridge leaves alone, such as { urgent = true }
local ALIVE = "/run/wattshift-slurm/alive" -- the bridge's ENGINE_SLURM_ALIVE_FILE; nil: jobs wait without one, too

-- A field that this version of Slurm does not have is nil.
local function field(record, name)
   local ok, value = pcall(function() return record[name] end)
   return ok and value or nil
end

local function is_set(record, name)
   local value = field(record, name)
   return value ~= nil and value ~= "" and value ~= 0
end

local function asks_for_gpus(job)
   for _, name in ipairs({ "gres", "tres_per_node", "tres_per_job", "tres_per_task", "tres_per_socket" }) do
      local value = field(job, name)
      -- The bridge plans no slices.
      if type(value) == "string" and value:gsub("gpu[:/][%w_]*%d+g%.%d+gb", ""):find("gpu", 1, true) then
         return true
      end
   end
   return false
end

local function is_special(job)
   for _, name in ipairs({ "dependency", "reservation", "begin_time" }) do
      if is_set(job, name) then
         return true
      end
   end
   local part = field(job, "het_job_offset")
   return not is_set(job, "script") or job.priority == 0 or (part ~= nil and part ~= slurm.NO_VAL)
end

local function is_awaited()
   local file = ALIVE and io.open(ALIVE)
   if not file then
      return ALIVE == nil
   end
   local until_s = file:read("*n")
   file:close()
   return until_s ~= nil and os.time() < until_s
end

local function is_steered(job, partitions)
   if PARTITIONS == nil then
      return true
   end
   if is_set(job, "partition") then
      for name in job.partition:gmatch("[^,]+") do
         if PARTITIONS[name] then
            return true
         end
      end
      return false
   end
   for name, partition in pairs(partitions) do
      if PARTITIONS[name] and field(partition, "flag_default") == 1 then
         return true
      end
   end
   return false
end

function slurm_job_submit(job, partitions, uid)
   local is_left = (job.comment or ""):find("wattshift:off", 1, true) or LEAVE_QOS[field(job, "qos") or ""]
   if is_left or is_special(job) or not asks_for_gpus(job) or not is_steered(job, partitions) or not is_awaited() then
      return slurm.SUCCESS
   end
   local begin_s = os.time() + HOLD_S
   job.begin_time = begin_s
   job.admin_comment = ("wattshift-hold:%d %s"):format(begin_s, job.admin_comment or ""):gsub("%s+$", "")
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end

return slurm.SUCCESS
