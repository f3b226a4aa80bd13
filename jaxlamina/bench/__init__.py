"""Measurements that the project's claims rest on: `jaxlamina bench …`.

A bench is a module that measures (`*_bench`) and one with its command and the columns of its tables
(`*_cli`); `report` prints them and ends with one line of JSON. Nothing here is imported by the rest of the
package but by the command line.
"""
