"""The service: admits groups, schedules their sessions on nodes, settles results and delivers them. No HTTP here."""
