"""The look of report pages: one HTML file each, without scripts or anything to fetch."""

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:980px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem;border-bottom:1px solid #ddd}
h3{font-size:1rem;margin-bottom:0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;width:100%}
td,th{padding:.2rem .5rem;text-align:right;border-bottom:1px solid #eee;white-space:nowrap}
td:first-child,th:first-child{text-align:left}tr.base td{background:#f5f5f5}
svg{width:100%;height:auto;display:block}.legend{font-size:12px;display:flex;flex-wrap:wrap;gap:.2rem 1rem}
.legend i{display:inline-block;width:12px;height:12px;margin-right:5px;vertical-align:middle}
.unit{font-size:12px;color:#666;margin:.4rem 0 0}.note{font-size:13px;color:#555}
nav{font-size:13px}nav a{margin-right:1rem}details{margin:.6rem 0}summary{cursor:pointer}
"""
