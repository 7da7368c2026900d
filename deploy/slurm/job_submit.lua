-- Give new GPU jobs a begin time a little ahead, so that Wattshift's bridge has time to plan them. The begin time passes
-- by itself: without a bridge, every job starts at most HOLD_S later than it would have. Slurm reads this file, beside
-- slurm.conf, with JobSubmitPlugins=lua. Jobs that opted out, or that have a begin time already, are left alone.

local HOLD_S = 30
local PARTITIONS = nil -- such as { batch = true }; nil: all

local function asks_for_gpus(job)
   for _, field in ipairs({ "gres", "tres_per_node", "tres_per_job", "tres_per_task", "tres_per_socket" }) do
      local ok, value = pcall(function() return job[field] end)
      if ok and type(value) == "string" and value:find("gpu", 1, true) then
         return true
      end
   end
   return false
end

function slurm_job_submit(job, partitions, uid)
   local comment = job.comment or ""
   local partition = job.partition or ""
   if (job.begin_time or 0) ~= 0 or not asks_for_gpus(job) or comment:find("wattshift:off", 1, true) then
      return slurm.SUCCESS
   end
   if PARTITIONS == nil or partition == "" or PARTITIONS[partition] then
      job.begin_time = os.time() + HOLD_S
   end
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end

return slurm.SUCCESS
