"""What is deleted once it is past its retention; plans of pools are forgotten as all work is."""

from sqlalchemy import text

FORGET = {
    "traffic": text("DELETE FROM pool_traffic WHERE start_at < now() - make_interval(secs => :traffic_days * 86400)"),
    "observations": text(
        "DELETE FROM app_observations WHERE start_at < now() - make_interval(secs => :traffic_days * 86400)"
    ),
    "instances": text("""
DELETE FROM pool_instances WHERE state = 'ended' AND ended_at < now() - make_interval(secs => :days * 86400)
"""),
    "plans of fleets": text("""
DELETE FROM fleet_plans p WHERE ended_at < now() - make_interval(secs => :days * 86400)
   AND EXISTS (SELECT FROM fleet_plans q WHERE q.fleet = p.fleet AND q.id > p.id)
"""),  # the newest of each stays
}
