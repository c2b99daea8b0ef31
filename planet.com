0.0005876917243421391  0.0008708830136629506 : Mass of the planets (in mstar)
10.239116765444093  45.91782253411823 : Semi-major axes
0.5990156279139932  0.08064650625030573 : Eccentricities
60.10000125125884  59.638846657837576 : Inclinaison (deg)
1  1 : is Inclinaison damping?
1  1 : planets feel Disk ?
1  1 : planets feel others ?
0  0 : Accretion onto planets ?
1.66  1.66 : Accretion parameter
0.001  0.001 : Maximum mass of the planet
0.4  0.4 : Smoothing
1.0  1.0 : Region excluded from torque calculation
